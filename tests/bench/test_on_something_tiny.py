"""Benchmarks that need hardware run here on something tiny, so that they work where it is there."""

import signal
import types

import pytest
import torch

from bench.__main__ import BENCHMARKS, main
from bench.end_to_end import online
from bench.gpu import run as gpu
from bench.harness.prompts import Prompt, equal_parts
from bench.harness.report import Report
from bench.serve.outcome import Outcome
from bench.services import draft_kernels
from outrider.errors import ConfigError


def test_the_gpu_benchmark_runs(monkeypatch):
    monkeypatch.setattr(Report, "save", lambda *_: None)
    report = Report("gpu", "")
    for _ in gpu.Bench(gpu.TINY, torch.device("cpu"), report).run(["step", "engine"]):
        gpu.plot(report)
    assert not [note for note in report.notes if "failed" in note]
    assert {row["what"] for row in report.rows} == {"plain step", "verification", "engine's step"}
    assert all(row["ms"] > 0 for row in report.rows)


def test_the_benchmark_of_the_drafts_kernels_runs():
    report = Report("draft-kernels", "")
    draft_kernels.run(draft_kernels.TINY, "gpu", report, interpret=True)
    assert len(report.notes) == 1, "a note of bandwidth, none of failures"
    assert {row["kernel"] for row in report.rows} >= {"picked", "plain"}
    assert all(row["us"] > 0 for row in report.rows)


def test_rounds_of_a_draft_that_learns(monkeypatch, tmp_path):
    """Every prompt is asked once, and a row tells of both systems."""
    prompts = [Prompt("x", (str(i),)) for i in range(11)]
    rounds = equal_parts(prompts, 3)
    assert [[prompt.turns[0] for prompt in part] for part in rounds] == [
        ["0", "1", "2"],
        ["3", "4", "5"],
        ["6", "7", "8"],
    ]
    metrics = 'outrider_online_steps_total{address="a"} 32.0\noutrider_online_kept_total{address="a"} 1.0\nother 5.0'
    assert online.learning_counters(metrics) == {"steps": 32, "kept": 1}

    def answer(text, accepted):
        return Outcome("x", texts=[text], output_tokens=20, learning_counters=True, drafted=10, accepted=accepted)

    learning = [online.Round([answer("a", 10), answer("b", 10)], {"steps": 32, "kept": 1})]
    still = [online.Round([answer("a", 0), answer("c", 0)], {})]
    report = Report("online", "")
    online.add_rows(report, learning, still)
    assert report.rows == [
        {"round": 1, "learning": 2.0, "as_it_was": 1.0, "steps": 32, "kept": 1, "rejected": 0, "same_text": "1/2"}
    ]
    monkeypatch.setattr("bench.harness.report._chosen", tmp_path)
    online.plot(report)
    assert (tmp_path / "online.png").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_what_a_benchmark_has_started_ends_with_it(number, code, monkeypatch):
    ended = []

    def run(_):
        try:
            signal.raise_signal(number)
        finally:
            ended.append(True)

    monkeypatch.setattr("bench.__main__.importlib.import_module", lambda _: types.SimpleNamespace(main=run))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match=str(code)):
            main(["target"])
        assert ended
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert main(["target"]) == 0, "as nohup wants it"
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_asked_for_its_flags(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["accept", "online", "peers", "quality", "self-draft", "serve"])
def test_a_file_without_prompts_is_refused_by_name(name, tmp_path, capsys):
    before = ["--draft", "x"] if name == "online" else []
    flag = [] if name in ("accept", "online") else ["--prompts"]
    (tmp_path / "wrong").write_text('{"question": 1}')
    (tmp_path / "empty").write_text("")
    for file, words in (("nowhere", "nowhere"), ("wrong", 'row 1 has neither "turns"'), ("empty", "empty")):
        with pytest.raises(SystemExit, match="2"):
            main([name, *before, *flag, str(tmp_path / file)])
        assert words in capsys.readouterr().err


def test_one_benchmark_that_cannot_run_here_keeps_no_other_from_it(monkeypatch, capsys):
    run = []

    def module(path):
        def main(_):
            run.append(path)
            if path == "bench.services.target_kernels":
                raise ConfigError("a C++ compiler is needed")

        return types.SimpleNamespace(main=main)

    monkeypatch.setattr("bench.__main__.importlib.import_module", module)
    assert main(["all"]) == 1
    assert run.index("bench.services.target_kernels") < run.index("bench.services.deterministic")
    assert capsys.readouterr().err == "outrider bench kernels: error: a C++ compiler is needed\n"
    with pytest.raises(ConfigError):
        main(["kernels"])


@pytest.mark.parametrize("wrong", [
    "trees --trees 2/4", "trees --trees 2/4/x", "trees --trees 2/4/6 2/3/6", "draft --kinds cpu",
    "draft --kinds foo/bfloat16", "draft --shapes 4", "gpu --parts foo", "kernels --threads 0",
    "target --formats float3", "deterministic --models mow",
])  # fmt: skip
def test_what_is_not_there_is_refused_before_anything_is_measured(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(wrong.split())
    assert f"argument {wrong.split()[1]}: " in capsys.readouterr().err


def test_none_of_a_thing_cannot_be_measured(capsys):
    wrong = ("accept x --limit 0", "online x --draft y --rounds 0", "peers --rounds 0", "scale --new-tokens 0")
    wrong += ("speculation x --turns 0", "system --concurrency 0", "self-draft --limit 0", "quality --count 0")
    for words in wrong:
        with pytest.raises(SystemExit, match="2"):
            main(words.split())
        assert "0 is less than 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["peers", "--outrider", "--transformers"])
    assert "there is nobody to ask" in capsys.readouterr().err
