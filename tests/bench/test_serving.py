"""Benchmarks of our own system, with a server in its place whose answers are known."""

import contextlib
import json
import sys
from pathlib import Path

import pytest

from bench.end_to_end import accept, online
from bench.end_to_end.system import transformers_generate
from bench.harness import report
from bench.harness.errors import BenchError
from bench.harness.processes import output_of
from bench.harness.prompts import Prompt
from bench.harness.report import Report
from bench.serve.outcome import Outcome
from bench.serve.outrider_system import generate, new_tokens, speculation
from outrider import cli
from tests.support.bench.server import TOKENS, WORDS, in_a_thread, running


async def test_conversations_are_held():
    told = []
    async with running() as (server, url):
        seconds, talks = await generate(url, [("one", "two"), ("three",)], 2, {"temperature": 0.5}, told.append)
        with pytest.raises(RuntimeError, match="HTTP 429: no "):
            await generate(url, [("429",)], 1, {})
    assert seconds > 0
    assert [[answer.text for answer in talk] for talk in talks] == [["".join(WORDS)] * 2, ["".join(WORDS)]]
    answers = [answer for talk in talks for answer in talk]
    assert new_tokens(answers) == 3 * TOKENS
    assert speculation(answers) == {"accept_length": 2.0, "acceptance_rate": pytest.approx(1 / 3)}
    assert speculation([]) == {"accept_length": 1.0, "acceptance_rate": 0.0}
    assert len(told) == 3
    assert {(body["stream"], body["temperature"]) for body in server.requests[:3]} == {(False, 0.5)}


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def served(model, flags, dtype):
        with in_a_thread() as url:
            yield url

    for module in (accept, online):
        monkeypatch.setattr(module, "served", served)
        monkeypatch.setattr(module, "resolve", Path)
    monkeypatch.setattr(report, "_chosen", tmp_path)
    file = tmp_path / "prompts.jsonl"
    rows = [{"category": c, "turns": ["first", "second"]} for c in ("a", "a", "b", "b")]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_accept_lengths_by_category(prompts, tmp_path):
    accept.main([str(prompts), "--model-path", "tiny", "--temperature", "0", "--only", "NGRAM"])
    rows = {(r["drafter"], r["measure"]): r for r in json.loads((tmp_path / "accept.json").read_text())["rows"]}
    assert {drafter for drafter, _ in rows} == {"none", "NGRAM"}
    length, rate = rows["NGRAM", "accept_length"], rows["NGRAM", "acceptance_rate"]
    assert (length["all"], length["a"], length["b"], length["same_text"]) == (2.0, 2.0, 2.0, "8/8")
    assert rate["b"] == pytest.approx(1 / 3)


def test_all_are_all_also_where_some_prompts_have_no_category():
    made, prompts = Report("accept", ""), [Prompt("all", ("x",)), Prompt("code", ("y",))]
    answers = [[Outcome(p.category, output_tokens=12, learning_counters=True, drafted=10, accepted=a)]
               for p, a in zip(prompts, (0, 9), strict=True)]  # fmt: skip
    accept.add_rows(made, "NGRAM", 0.0, accept.Result(1.0, answers), prompts, None)
    length, rate = made.rows
    assert (length["all"], length["code"]) == (pytest.approx(24 / 15), 4.0)
    assert (rate["all"], rate["code"]) == (0.45, 0.9)


def test_a_system_that_does_not_start_is_told_without_a_traceback(prompts, monkeypatch, capsys):
    def served(*_):
        raise BenchError("outrider serve ended with code 2")

    monkeypatch.setattr(accept, "served", served)
    assert cli.main(["bench", "accept", str(prompts), "--model-path", "tiny"]) == 1
    assert capsys.readouterr().err == "outrider: error: outrider serve ended with code 2\n"


def test_a_program_that_fails_is_told_in_its_own_words(monkeypatch):
    assert output_of([sys.executable, "-c", "print(input())"], "said") == "said\n"
    with pytest.raises(BenchError, match=r"ended with code 1:\nno such model"):
        output_of([sys.executable, "-c", "raise SystemExit('no such model')"])
    monkeypatch.setattr("bench.end_to_end.system.sys.executable", "false")
    with pytest.raises(BenchError, match=r"false -m bench\.plain_transformers x .* ended with code 1"):
        transformers_generate("x", "float32", ["x"], 4)


def test_accept_goes_on_with_what_is_missing(prompts, tmp_path, monkeypatch, capsys):
    flags = [str(prompts), "--model-path", "tiny", "--only", "NGRAM", "--temperature"]

    def taken():
        rows = json.loads((tmp_path / "accept.json").read_text())["rows"]
        return [(r["drafter"], r["temperature"]) for r in rows if r["measure"] == "accept_length"]

    accept.main([*flags, "0"])
    accept.main([*flags, "0", "1", "--resume"])
    assert taken() == [("none", 0.0), ("NGRAM", 0.0), ("none", 1.0), ("NGRAM", 1.0)]
    monkeypatch.setattr(report, "commit", lambda: "0000000")
    with pytest.raises(SystemExit):
        accept.main([*flags, "0", "1", "--resume"])
    assert "are of commit" in capsys.readouterr().err


def test_rounds_of_learning(prompts, tmp_path):
    online.main([str(prompts), "--draft", "x", "--model-path", "tiny", "--rounds", "2"])
    rows = json.loads((tmp_path / "online.json").read_text())["rows"]
    assert [(r["learning"], r["as_it_was"], r["same_text"]) for r in rows] == [(2.0, 2.0, "2/2")] * 2
