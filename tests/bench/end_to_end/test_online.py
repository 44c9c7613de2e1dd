"""The benchmark of online training, with a simulated server."""

import json
from unittest import mock

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

    trained = [online.Result([answer("a", 10), answer("b", 10)], {"steps": 32, "kept": 1})]
    frozen = [online.Result([answer("a", 0), answer("c", 0)], {})]
    report = Report("online", "")
    online.add_rows(report, [online.Part("1", ["x", "y"], True)], trained, frozen)
    figures = {"online": 2.0, "frozen": 1.0, "over_frozen": 2.0, "low": 2.0, "high": 2.0}
    figures |= {"steps": 32, "kept": 1, "rejected": 0, "same_text": "1/2"}
    assert report.rows == [{"round": "1"} | figures, {"round": "1 to 1"} | figures]
    online.plot(report)
    assert (report_folder / "online.png").exists()


def test_interval_of_the_ratio_contains_it_and_narrows_with_equal_prompts():
    def answers(accepted):
        return [Outcome("x", output_tokens=20, counted=True, drafted=10, accepted=a) for a in accepted]

    mean, low, high = online.length_ratio(answers([10, 4, 0, 12]), answers([0, 0, 0, 0]))
    assert low < mean < high
    assert online.length_ratio(answers([10] * 4), answers([0] * 4)) == (2.0, 2.0, 2.0)


def test_program_writes_a_row_per_round(prompts, tmp_path):
    """Held-out old prompts have a salt, so that the drafter does not learn from them, and the others have none."""
    sent = []

    async def generate(url, turns, concurrency, body, done):
        for _ in turns:
            done(None)
        sent.append(([text for (text,) in turns], body.get("cache_salt")))
        return 1.0, [[Outcome("x", output_tokens=20, counted=True, drafted=10, accepted=10)] for _ in turns]

    old = tmp_path / "old.jsonl"
    old.write_text("\n".join(json.dumps({"prompt": text}) for text in "pqrs"))
    with mock.patch.object(online, "generate", generate):
        asked = ["--model-path", "tiny", "--rounds", "2", "--old", str(old), "--preface", "In: "]
        online.main([str(prompts), "--draft", "x", *asked])
    rows = json.loads((tmp_path / "online.json").read_text())["rows"]
    assert [row["round"] for row in rows] == ["old, before", "old, served", "1", "2", "2 to 2", "old, after"]
    assert {(row["online"], row["frozen"]) for row in rows} == {(2.0, 2.0)}
    held_out = {tuple(texts) for texts, salt in sent if salt}
    served = {text for texts, salt in sent if not salt for text in texts}
    assert len(held_out) == 1
    assert served == set("pqrs") - set(*held_out) | {"In: first"}
    # The system without training is not asked twice: both rounds have the same prompts here.
    assert [bool(salt) for _, salt in sent] == [True, False, False, True, False, False, False, True]
