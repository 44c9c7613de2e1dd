"""The benchmark of online training, with a simulated server."""

import json

from bench.end_to_end import online
from bench.harness.prompts import Prompt, equal_parts
from bench.harness.report import Report
from bench.serve.outcome import Outcome


def test_rows_counters_and_plot(report_folder):
    """Every prompt is used once, and a row has the figures of both systems."""
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
        return Outcome("x", texts=[text], output_tokens=20, counted=True, drafted=10, accepted=accepted)

    trained = [online.Round([answer("a", 10), answer("b", 10)], {"steps": 32, "kept": 1})]
    frozen = [online.Round([answer("a", 0), answer("c", 0)], {})]
    report = Report("online", "")
    online.add_rows(report, trained, frozen)
    assert report.rows == [
        {"round": 1, "online": 2.0, "frozen": 1.0, "steps": 32, "kept": 1, "rejected": 0, "same_text": "1/2"}
    ]
    online.plot(report)
    assert (report_folder / "online.png").exists()


def test_program_writes_a_row_per_round(prompts, tmp_path):
    online.main([str(prompts), "--draft", "x", "--model-path", "tiny", "--rounds", "2"])
    rows = json.loads((tmp_path / "online.json").read_text())["rows"]
    assert [(r["online"], r["frozen"], r["same_text"]) for r in rows] == [(2.0, 2.0, "2/2")] * 2
