"""The measurement of the whole system, with a tiny random pair on the CPU: three processes."""

import argparse
import time
from dataclasses import replace

import pytest

from bench.gpu.system import run
from bench.gpu.system.checkpoints import TINY_MODEL, write_pair
from bench.gpu.system.recording import Recorder, Recordings
from bench.harness.report import Report


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr(Report, "save", lambda report, _: report.notes.append("a timeline was drawn"))
    return Report("gpu-system", "")


ADAPTIVE = {"tree": None, "sessions": (1,), "new_tokens": 96}  # of one session, because that compiles fewer programs


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, ADAPTIVE])
def test_all_cells_are_measured(report, changes):
    selection = replace(run.TINY_SELECTION, transports=("grpc",), **changes)
    for _ in run.measure(selection, report, tiny=True, draws=True):
        pass
    rows = {row["asked"]: row for row in report.rows}
    assert set(rows) == {"plain", 3.0}
    assert "a timeline was drawn" in report.notes
    for asked, row in rows.items():
        assert row["same text"] == "{0}/{0}".format(*selection.sessions)
        assert row["per TB/s"] > 0
        assert row["target device"] > 0
        assert row["step ms"] == pytest.approx(row["target device"] + row["target idle"], abs=0.01)
        if asked == "plain":
            assert (row["accept length"], row["draft tokens"]) == (1.0, 0.0)
        else:
            assert row["accept length"] == pytest.approx(asked, abs=0.7)
            assert row["draft tokens"] > 0
            assert row["draft device"] > 0
            assert row["wire"] > 0


def test_recordings_are_waited_for_only_if_none_has_come_since(tmp_path):
    recorder, recordings = Recorder(tmp_path, "draft"), Recordings(tmp_path, "draft")
    since = time.time() - 1
    recorder.rows["step"].append((1.0, 2.0))
    recorder.write()
    assert len(recordings.next(since, 0.05)["step"]) == 1  # without commits: of an engine that was idle before
    recorder.rows["commits"].append((3.0, 4.0))
    recorder.write()
    began = time.monotonic()
    assert recordings.next(since, 30.0)["commits"].tolist() == [[3.0, 4.0]]
    assert time.monotonic() - began < 20


def test_half_a_pair_is_refused(capsys):
    parser = argparse.ArgumentParser()
    run.add_flags(parser)
    args = parser.parse_args(["--model-path", "somewhere"])
    args.tiny = False
    with pytest.raises(SystemExit):
        run.selection_of(args, parser)
    assert "needs both" in capsys.readouterr().err


def test_a_real_pair_drafts_for_itself(report, tmp_path, monkeypatch):
    target, head = write_pair(tmp_path, TINY_MODEL, "cpu")
    selection, found = replace(run.TINY_SELECTION, model=str(target), head=str(head)), []
    monkeypatch.setattr(run.System, "_cells", lambda _, *chosen: found.append(chosen) or iter(()))
    system = run.System(tmp_path, selection, report, 1e12, 0.0, on_cuda=False, draws=False)
    assert list(system.measure(TINY_MODEL)) == []
    ((*paths, simulated, cells, prompts),) = found
    assert (paths, simulated, cells) == ([target, head], None, [(64, 2)])
    assert [len(prompt) for prompt in prompts[64]] == [64, 64]


def test_cells_beyond_the_memory_become_notes(report, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "gpu_memory", lambda: 80 << 30)
    monkeypatch.setattr(run.CheckpointSizes, "weights", lambda *_: 16 << 30)
    monkeypatch.setattr(run.CheckpointSizes, "token_bytes", lambda *_: 131072)
    system = run.System(tmp_path, run.Selection(), report, 1e12, 0.0, on_cuda=True, draws=False)
    fitting = system._fitting(tmp_path)
    assert (8192, 16) in fitting
    assert (8192, 64) not in fitting
    assert report.notes == ["64 sessions of 8192 tokens do not fit into the device's memory."]
