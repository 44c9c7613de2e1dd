"""The program `bench speculation`, with simulated and with real systems."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import pytest

from bench.harness import report
from bench.harness.errors import BenchError
from bench.speculation.page import command
from bench.speculation.run import main
from tests.support.bench.server import in_a_thread
from tests.support.tiny import write_model, write_tokenizer


def test_recommended_command():
    args = argparse.Namespace(model_path="my model", dtype="float32", flags=["--page-size", "32"])
    assert command(args, "--speculative-algorithm NONE") == (
        "outrider serve --model-path 'my model' --dtype float32 --page-size 32 --speculative-algorithm NONE"
    )


def test_settings_against_a_baseline(prompts, tmp_path):
    served = []

    @contextlib.contextmanager
    def serve(model, flags, dtype, most):
        served.append(" ".join(flags))
        with in_a_thread() as url:
            yield url

    flags = [str(prompts), "--model-path", "tiny", "--drafters", "--rounds", "2", "--concurrency", "1"]
    flags += ["--temperature", "0", "--setting", "default=--speculative-algorithm AUTO"]
    assert main([*flags, "--baseline", "own=--self-speculation lookup"], serve) == 0
    assert served == ["--self-speculation lookup", "--speculative-algorithm AUTO"]
    page = (tmp_path / "speculation.md").read_text()
    assert page.startswith("# Settings of speculation against own")
    assert "own is --self-speculation lookup" in page
    (row,) = json.loads((tmp_path / "speculation.json").read_text())["rows"]
    assert row["own_tokens_per_s"] > 0


@pytest.fixture
def prompts(report_folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["outrider", "bench", "speculation", "x"])
    monkeypatch.setattr("bench.speculation.page.resolve", Path)
    file = report_folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"number {i}"}) for i in range(4)))
    return file


@pytest.mark.long
def test_program_resumes(prompts, tmp_path, capsys):
    served = []

    @contextlib.contextmanager
    def serve(model, flags, dtype, most):
        served.append(" ".join(flags))
        if "8" in flags:
            raise BenchError("out of memory")
        with in_a_thread() as url:
            yield url

    flags = [str(prompts), "--model-path", "tiny", "--drafters", "NGRAM", "--rounds", "2", "--concurrency", "1", "2"]
    flags += ["--temperature", "0"]
    assert main([*flags, "--num-draft-tokens", "4", "8"], serve) == 0
    assert [line.split()[-1] for line in served] == ["NONE", "NGRAM", "4", "8"]
    page = (tmp_path / "speculation.md").read_text()
    assert "- NGRAM, 8 tokens: not measured: out of memory" in page
    assert "shorter than 3 s" in page
    assert "## Recommended settings by concurrency" in page
    assert "| outrider serve --model-path tiny --speculative-algorithm N" in page
    content = json.loads((tmp_path / "speculation.json").read_text())
    assert [(r["setting"], r["concurrency"]) for r in content["rows"]] == [
        ("NGRAM, adaptive", 1), ("NGRAM, adaptive", 2), ("NGRAM, 4 tokens", 1), ("NGRAM, 4 tokens", 2),
    ]  # fmt: skip
    assert (tmp_path / "speculation.png").stat().st_size > 5_000
    assert "over_best_fixed=" in capsys.readouterr().out
    served.clear()
    assert main([*flags, "--num-draft-tokens", "4", "6", "--resume"], serve) == 0
    assert [line.split()[-1] for line in served] == ["NONE", "6"]
    assert len(json.loads((tmp_path / "speculation.json").read_text())["rows"]) == 6
    served.clear()
    assert main([*flags, "--num-draft-tokens", "4", "--max-tokens", "64", "--resume"], serve) == 0
    assert len(served) == 3, "answers of another length need a new measurement"


def test_resume_rejects_rows_of_another_commit_or_machine(prompts, tmp_path, capsys, monkeypatch):
    @contextlib.contextmanager
    def serve(*_):
        with in_a_thread() as url:
            yield url

    flags = [str(prompts), "--model-path", "tiny", "--drafters", "--setting", "mine=--speculative-algorithm NGRAM"]
    flags += ["--rounds", "2", "--concurrency", "1", "--temperature", "0"]
    assert main(flags, serve) == 0
    page = (tmp_path / "speculation.json").read_text()
    for name, value in (("commit", "0000000"), ("hardware", {"cpu": "another one"})):
        with monkeypatch.context() as patch:
            patch.setattr(report, name, lambda value=value: value)
            with pytest.raises(SystemExit) as ended:
                main([*flags, "--resume"], serve)
        assert ended.value.code == 2
        assert f"are of {name}" in capsys.readouterr().err
    assert (tmp_path / "speculation.json").read_text() == page


def test_too_few_prompts_are_a_usage_error(prompts, capsys):
    with pytest.raises(SystemExit):
        main([str(prompts), "--rounds", "2", "--concurrency", "8"])
    assert "too few for concurrency 8" in capsys.readouterr().err


def test_a_single_round_is_a_usage_error(prompts, capsys):
    with pytest.raises(SystemExit):
        main([str(prompts), "--rounds", "1", "--concurrency", "1"])
    assert "2 or more" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.system
def test_real_systems(prompts, tmp_path):
    """A tiny model with plain decoding and with the n-gram drafter."""
    model = write_tokenizer(write_model(tmp_path / "model"))
    flags = [str(prompts), "--model-path", str(model), "--drafters", "--setting", "mine=--speculative-algorithm NGRAM"]
    loads = ["--rounds", "2", "--concurrency", "2", "--temperature", "0", "--max-tokens", "24", "--ignore-eos"]
    assert main([*flags, *loads]) == 0
    (row,) = json.loads((tmp_path / "speculation.json").read_text())["rows"]
    assert (row["setting"], row["kind"], row["same_text"]) == ("mine", "adaptive", "4/4")
    assert row["accept_length"] >= 1.0


def test_a_failed_start_keeps_an_earlier_page(prompts, tmp_path, capsys):
    for end in ("json", "md"):
        (tmp_path / f"speculation.{end}").write_text("earlier")

    @contextlib.contextmanager
    def serve(*_):
        raise BenchError("outrider serve ended with code 2")
        yield

    assert main([str(prompts), "--model-path", "tiny", "--rounds", "2", "--concurrency", "1"], serve) == 1
    assert "ended with code 2" in capsys.readouterr().err
    assert {(tmp_path / f"speculation.{end}").read_text() for end in ("json", "md")} == {"earlier"}
