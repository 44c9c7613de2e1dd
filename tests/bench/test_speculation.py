"""Settings side by side: which there are, how they are measured in turns, and what follows from their rounds."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bench.harness import report
from bench.harness.errors import BenchError
from bench.harness.prompts import Prompt
from bench.serve.client import Target
from bench.serve.outcome import Outcome
from bench.serve.outrider_system import served
from bench.speculation import comparison
from bench.speculation.page import command
from bench.speculation.paired_rounds import Cell, Pair, measured_row, run_pairs
from bench.speculation.run import main
from bench.speculation.settings import PLAIN, Setting, grid, named, shapes
from tests.support.bench.server import TOKENS, in_a_thread, running
from tests.support.tiny import write_model, write_tokenizer


def test_the_grid_has_every_tree_that_there_can_be():
    assert shapes([1, 3], [1, 4], [4, 8, 64]) == [(1, 1, 2), (1, 4, 4), (3, 1, 4), (3, 4, 4), (3, 4, 8)]
    assert shapes([5], [4], [4]) == [], "four rows are never five steps deep"
    settings = grid(["NGRAM", "EAGLE3+NGRAM"], [3], [1, 4], [8], "head")
    assert [(s.name, s.kind) for s in settings] == [
        ("NGRAM, adaptive", "adaptive"),
        ("NGRAM, 8 rows", "fixed"),
        ("EAGLE3+NGRAM, adaptive", "adaptive"),
        ("EAGLE3+NGRAM, 3x1x4", "fixed"),
        ("EAGLE3+NGRAM, 3x4x8", "fixed"),
    ]
    assert settings[1].flags == ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
    assert " ".join(settings[4].flags) == (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path head --speculative-ngram-beside "
        "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
    )
    assert PLAIN.kind == "plain"


def test_settings_of_the_command_line():
    assert named("mine=--speculative-algorithm NGRAM --speculative-num-draft-tokens=4") == Setting(
        "mine", "mine", ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens=4")
    )
    assert named("mine=--speculative-algorithm NGRAM --speculative-num-draft-tokens=4").kind == "fixed"
    with pytest.raises(ValueError, match="NAME=FLAGS"):
        named("--speculative-algorithm NGRAM")


def row(setting, kind, *rounds, concurrency=1, temperature=0.0, drafter="D"):
    over = comparison.ratio(rounds)
    return {"setting": setting, "kind": kind, "drafter": drafter, "flags": f"--{setting}", "temperature": temperature,
            "concurrency": concurrency, "ratio": over.mean, "rounds": list(rounds)}  # fmt: skip


def test_verdicts_are_students():
    rng = np.random.default_rng(5)
    for count in (2, 4, 31, 40):
        logarithms = rng.normal(0.1, 0.2, count)
        over = comparison.ratio(np.exp(logarithms).tolist())
        low, high = stats.t.interval(0.95, count - 1, logarithms.mean(), stats.sem(logarithms))
        assert over.mean == pytest.approx(np.exp(logarithms.mean()))
        assert (over.low, over.high) == pytest.approx((np.exp(low), np.exp(high)), rel=0.01)
    assert comparison.verdict([1.5, 1.52, 1.48], [1.0, 1.02, 1.0]) == "win"
    assert comparison.verdict([1.0, 1.02, 1.0], [1.5, 1.52, 1.48]) == "lose"
    assert comparison.verdict([1.04, 5.74], [1.0, 1.0]) == "tie", "faster in both rounds, but who knows how much"
    assert comparison.verdict([3.0, 1.0, 2.0], [2.9, 0.95, 1.9]) == "win", "the rounds differ more than the two"
    assert comparison.over_plain([2.0]) == "tie"
    assert comparison.over_plain([1.0, 1.0]) == "tie"


def test_trees_that_adapt_beside_the_best_explicit_one():
    rows = [
        row("a", "adaptive", 1.52, 1.5, 1.51),
        row("f1", "fixed", 1.2, 1.2, 1.2),
        row("f2", "fixed", 1.3, 1.3, 1.31),
        row("a", "adaptive", 0.98, 1.01, 1.0, concurrency=8),
        row("f1", "fixed", 1.1, 1.12, 1.1, concurrency=8),
        row("f2", "fixed", 0.5, 0.5, 0.5, concurrency=8),
        row("n", "adaptive", 1.0, 1.1, 1.0, drafter="N"),
    ]
    first, second, third = comparison.adaptive_against_fixed(rows)
    assert (first["best_fixed"], first["over_best_fixed"], first["over_plain"]) == ("f2", "win", "win")
    assert (second["best_fixed"], second["over_best_fixed"], second["over_plain"]) == ("f1", "lose", "tie")
    assert "best_fixed" not in third


def recommended(*rows):
    return {concurrency: best and best.setting for concurrency, best in comparison.recommendations(rows).items()}


def test_what_is_proposed():
    tree = row("f", "fixed", 1.6, 1.45, 1.5)
    adapts = row("a", "adaptive", 1.4, 1.5, 1.4)
    assert recommended(adapts, tree) == {1: "a"}, "they tie, and what adapts suits other loads, too"
    assert recommended(adapts, row("f", "fixed", 1.6, 1.7, 1.6)) == {1: "f"}
    assert recommended(row("f", "fixed", 1.6, 0.9, 1.5)) == {1: None}, "nobody knows whether it beats plain decoding"
    assert recommended(row("f", "fixed", 1.6, 0.9, 1.6), row("g", "fixed", 1.1, 1.1, 1.1)) == {1: "g"}
    assert recommended(row("a", "adaptive", 0.9, 0.8, concurrency=8), tree) == {8: None, 1: "f"}
    cold = [row("a", "adaptive", 1.4, 1.4), row("f", "fixed", 1.3, 1.3)]
    hot = [row("a", "adaptive", 0.7, 0.7, temperature=1.0), row("f", "fixed", 1.2, 1.2, temperature=1.0)]
    both = comparison.recommendations([*cold, *hot])[1]
    assert (both.setting, both.flags) == ("f", "--f"), "over all temperatures"
    assert both.ratio.mean == pytest.approx((1.3 * 1.2) ** 0.5)
    assert comparison.recommendations([]) == {}


def test_the_command_that_is_proposed():
    args = argparse.Namespace(model_path="my model", dtype="float32", flags=["--page-size", "32"])
    assert command(args, "--speculative-algorithm NONE") == (
        "outrider serve --model-path 'my model' --dtype float32 --page-size 32 --speculative-algorithm NONE"
    )


async def test_systems_take_turns():
    parts = [[Prompt("x", ("one two",)), Prompt("x", ("three",))]] * 3
    async with running() as (fast, url), running() as (slow, other):
        target, plain = (Target(address, body={"max_tokens": 9}) for address in (url, other))
        pairs = await run_pairs(target, plain, parts, Cell(0.5, 2))
        assert (fast.flushed, slow.flushed) == (1, 1)
        assert fast.most == slow.most == 2
        bodies = fast.requests[4:]
        assert [body["seed"] for body in bodies] == [0, 1, 1000, 1001, 2000, 2001]
        assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(0.5, 9)}
        assert slow.requests[4:] == bodies
        with pytest.raises(RuntimeError, match="HTTP 500"):
            await run_pairs(target, plain, [[Prompt("x", ("500",))]], Cell(0.0, 1))
    facts = measured_row(pairs)
    assert len(facts["rounds"]) == 3
    assert facts["low"] < facts["ratio"] < facts["high"]
    assert (facts["accept_length"], facts["acceptance_rate"], facts["same_text"]) == (2.0, pytest.approx(1 / 3), "6/6")
    assert sum(o.output_tokens for pair in pairs for o in pair.plain) == 6 * TOKENS


def test_facts_of_rounds():
    def answered(begin, end, text="a", accepted=0, drafted=0):
        return Outcome("x", due=begin, ended=end, texts=[text], output_tokens=12, learning_counters=True, accepted=accepted,
                       drafted=drafted)  # fmt: skip

    first = Pair([answered(0, 2, accepted=6, drafted=9), answered(0, 4)], [answered(0, 6), answered(0, 6)])
    second = Pair([answered(5, 7), answered(6, 9, "b", drafted=3)], [answered(1, 5), answered(5, 9)])
    facts = measured_row([first, second])
    assert facts["rounds"] == [1.5, 2.0]
    assert facts["ratio"] == pytest.approx(3**0.5)
    assert (facts["tokens_per_s"], facts["plain_tokens_per_s"], facts["round_s"]) == (48 / 8, 48 / 14, 4.0)
    assert (facts["accept_length"], facts["acceptance_rate"], facts["same_text"]) == (48 / 42, 0.5, "3/4")


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_chosen", tmp_path)
    monkeypatch.setattr(sys, "argv", ["outrider", "bench", "speculation", "x"])
    monkeypatch.setattr("bench.speculation.page.resolve", Path)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"number {i}"}) for i in range(4)))
    return file


def test_the_program_goes_on_where_it_ended(prompts, tmp_path, capsys):
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
    assert "- NGRAM, 8 rows: not measured: out of memory" in page
    assert "shorter than 3 s" in page
    assert "## What to serve with, by concurrency" in page
    assert "| outrider serve --model-path tiny --speculative-algorithm N" in page
    content = json.loads((tmp_path / "speculation.json").read_text())
    assert [(r["setting"], r["concurrency"]) for r in content["rows"]] == [
        ("NGRAM, adaptive", 1), ("NGRAM, adaptive", 2), ("NGRAM, 4 rows", 1), ("NGRAM, 4 rows", 2),
    ]  # fmt: skip
    assert (tmp_path / "speculation.png").stat().st_size > 5_000
    assert "over_best_fixed=" in capsys.readouterr().out
    served.clear()
    assert main([*flags, "--num-draft-tokens", "4", "6", "--resume"], serve) == 0
    assert [line.split()[-1] for line in served] == ["NONE", "6"]
    assert len(json.loads((tmp_path / "speculation.json").read_text())["rows"]) == 6
    served.clear()
    assert main([*flags, "--num-draft-tokens", "4", "--max-tokens", "64", "--resume"], serve) == 0
    assert len(served) == 3, "answers of another length are another measurement"


def test_rows_of_other_code_or_of_another_machine_are_not_taken_for_ours(prompts, tmp_path, capsys, monkeypatch):
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


def test_no_prompt_is_asked_twice(prompts, capsys):
    with pytest.raises(SystemExit):
        main([str(prompts), "--rounds", "2", "--concurrency", "8"])
    assert "too few for 8 at a time" in capsys.readouterr().err


def test_one_round_is_none(prompts, capsys):
    with pytest.raises(SystemExit):
        main([str(prompts), "--rounds", "1", "--concurrency", "1"])
    assert "2 or more" in capsys.readouterr().err


@pytest.mark.system
def test_real_systems(prompts, tmp_path):
    """A tiny model, plainly and with n-grams."""
    model = write_tokenizer(write_model(tmp_path / "model"))
    flags = [str(prompts), "--model-path", str(model), "--drafters", "--setting", "mine=--speculative-algorithm NGRAM"]
    loads = ["--rounds", "2", "--concurrency", "2", "--temperature", "0", "--max-tokens", "24", "--ignore-eos"]
    assert main([*flags, *loads]) == 0
    (row,) = json.loads((tmp_path / "speculation.json").read_text())["rows"]
    assert (row["setting"], row["kind"], row["same_text"]) == ("mine", "adaptive", "4/4")
    assert row["accept_length"] >= 1.0


def test_flags_that_are_refused_are_told_in_the_words_of_the_refusal():
    flags = ["--speculative-algorithm", "STANDALONE"]
    with pytest.raises(BenchError, match=r"ended with code 2: .*STANDALONE drafts with"), served("x", flags, "auto"):
        pass
    words = r"ended with code 2: [^─]*Unrecognized options: --nonsense"
    with pytest.raises(BenchError, match=words), served("x", ["--nonsense"], "auto"):
        pass


def test_a_system_that_does_not_start_is_told(prompts, tmp_path, capsys):
    """And leaves an earlier page as it was."""
    for end in ("json", "md"):
        (tmp_path / f"speculation.{end}").write_text("earlier")

    @contextlib.contextmanager
    def serve(*_):
        raise BenchError("outrider serve ended with code 2")
        yield

    assert main([str(prompts), "--model-path", "tiny", "--rounds", "2", "--concurrency", "1"], serve) == 1
    assert "ended with code 2" in capsys.readouterr().err
    assert {(tmp_path / f"speculation.{end}").read_text() for end in ("json", "md")} == {"earlier"}
