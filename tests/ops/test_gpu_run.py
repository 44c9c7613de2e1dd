"""The run of everything that needs a GPU, with other processes in its place."""

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu import __main__ as gpu

HANGS = "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', \
flush=True); subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)']) if %d else time.sleep(600)"


def part(name, code, seconds=30.0):
    return gpu.Part(name, ("-c", code), seconds)


def test_a_part_that_hangs_or_fails_keeps_none_from_running(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    run, began = gpu.Run(time.monotonic() + 100, tmp_path), time.monotonic()
    run.parts([part("hangs", HANGS % 1, 0.8), part("fails", "print('why'); raise SystemExit(3)"), part("good", "")])
    assert time.monotonic() - began < 20
    assert run.failed
    summary = (tmp_path / "summary.txt").read_text()
    assert "its limit" in summary
    assert "begun" in summary
    assert "fails: failed with code 3" in summary
    assert "why" in summary
    assert "good: done" in summary
    assert (tmp_path / "hangs.log").read_text() == "begun\n"


def test_without_time_nothing_begins(tmp_path):
    run = gpu.Run(time.monotonic() + gpu.GRACE + gpu.LEAST - 1, tmp_path)
    run.parts([part("late", "raise SystemExit(1)")])
    assert "late: did not run" in (tmp_path / "summary.txt").read_text()
    assert not run.failed


def test_parts_for_more_gpus_than_there_are_do_not_begin(tmp_path):
    run = gpu.Run(time.monotonic() + 100, tmp_path, gpus=1)
    run.parts([gpu.Part("two", ("-c", "raise SystemExit(1)"), 30.0, gpus=2)])
    assert "two: did not run, because it needs 2 GPUs" in (tmp_path / "summary.txt").read_text()
    assert not run.failed


def test_pages_go_into_the_named_folder(tmp_path):
    run = gpu.Run(time.monotonic() + 100, tmp_path)
    run.parts([gpu.Part("page", ("-c", "import sys; print(sys.argv[1:])"), 30.0, pages=True)])
    assert (tmp_path / "page.log").read_text() == f"['--output', '{tmp_path}']\n"


def test_every_file_of_tests_belongs_to_one_part():
    files = Counter(word for part in gpu.PARTS for word in part.arguments if word.endswith(".py"))
    assert files == Counter(f"tests/gpu/{path.name}" for path in Path(gpu.__file__).parent.glob("test_*.py"))


def test_parts_that_are_none_are_refused():
    assert [part.name for part in gpu.chosen(("engine", "system"))] == ["system", "engine"]
    with pytest.raises(SystemExit, match="no part nothing"):
        gpu.chosen(("nothing",))
