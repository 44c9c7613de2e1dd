"""The benchmark of accept length, with a simulated server."""

import json

import pytest

from bench.end_to_end import accept
from bench.harness import report
from bench.harness.errors import BenchError
from bench.harness.prompts import Prompt
from bench.harness.report import Report
from bench.serve.outcome import Outcome
from outrider import cli


def test_accept_lengths_by_category(prompts, tmp_path):
    accept.main([str(prompts), "--model-path", "tiny", "--temperature", "0", "--only", "NGRAM"])
    rows = {(r["drafter"], r["measure"]): r for r in json.loads((tmp_path / "accept.json").read_text())["rows"]}
    assert {drafter for drafter, _ in rows} == {"none", "NGRAM"}
    length, rate = rows["NGRAM", "accept_length"], rows["NGRAM", "acceptance_rate"]
    assert (length["all"], length["a"], length["b"], length["same_text"]) == (2.0, 2.0, 2.0, "8/8")
    assert rate["b"] == pytest.approx(1 / 3)


def test_column_all_covers_every_category():
    made, prompts = Report("accept", ""), [Prompt("all", ("x",)), Prompt("code", ("y",))]
    answers = [[Outcome(p.category, output_tokens=12, counted=True, drafted=10, accepted=a)]
               for p, a in zip(prompts, (0, 9), strict=True)]  # fmt: skip
    accept.add_rows(made, "NGRAM", 0.0, accept.Result(1.0, answers), prompts, None)
    length, rate = made.rows
    assert (length["all"], length["code"]) == (pytest.approx(24 / 15), 4.0)
    assert (rate["all"], rate["code"]) == (0.45, 0.9)


def test_a_failed_start_is_reported_without_a_traceback(prompts, monkeypatch, capsys):
    def served(*_):
        raise BenchError("outrider serve ended with code 2")

    monkeypatch.setattr(accept, "served", served)
    assert cli.main(["bench", "accept", str(prompts), "--model-path", "tiny"]) == 1
    assert capsys.readouterr().err == "outrider: error: outrider serve ended with code 2\n"


def test_resume_measures_missing_rows(prompts, tmp_path, monkeypatch, capsys):
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
