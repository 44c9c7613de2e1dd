"""`bench scale`: costs of steps, expected speedups, and a run with a tiny model."""

import argparse
import contextlib
import json
from pathlib import Path

import pytest

from bench.scale import run
from bench.scale.run import main, step_costs
from bench.scale.system import Draft, Generation
from bench.scale.theory import speedup
from bench.services import target
from tests.support.tiny import write_model, write_tokenizer


def test_step_costs_by_context(tmp_path, monkeypatch):
    """Costs are measured once per context; a context that leaves no room for the steps is shortened."""
    model = write_model(tmp_path / "model", max_position_embeddings=400)
    opened = []

    def recorded(session_id, prompt, new):
        opened.append(len(prompt))
        return open_request(session_id, prompt, new)

    open_request = target.open_request
    monkeypatch.setattr(target, "open_request", recorded)
    monkeypatch.setattr("bench.scale.run.STEP_TOKENS", (1, 3))
    monkeypatch.setattr("bench.scale.run.STEPS", 2)
    costs = step_costs(str(model), "float32", [24, 120, 399])
    assert opened == [24, 120, 400 - 2 * (2 + 4) - 4]
    assert list(costs) == [24, 120, 399]
    assert all(cost(0) > 0 for cost in costs.values())


def test_expected_speedup_uses_the_context_of_the_point(monkeypatch):
    @contextlib.contextmanager
    def gateway(*_):
        yield "nowhere"

    async def generate(_, asked, new, speculate):
        return [Generation((1,) * new, 10.0, 1.0) for _ in asked]

    for name, replacement in (("gateway", gateway), ("generate", generate), ("write_texts", lambda *_: None)):
        monkeypatch.setattr(run, name, replacement)
    monkeypatch.setattr(run, "token_prompts", lambda _, context, count: [[0] * context] * count)
    args = argparse.Namespace(new_tokens=4, rounds=1)
    costs = {100: lambda n: 0.01 + 0.001 * n, 4000: lambda n: 0.02 + 0.01 * n}
    draft = Draft(0.8, 0.0, 0.0, 4)
    points = [run.measure_point(Path(), Path(), "", run.Cell("context", n, n, 1, draft), args, costs) for n in costs]
    assert [point["expected"] for point in points] == [
        speedup(0.8, cost, run.STREAM_LATENCY, 4) for cost in costs.values()
    ]
    assert points[0]["expected"] > points[1]["expected"]


@pytest.mark.long
@pytest.mark.system
def test_two_axes_of_a_tiny_model(report_folder, tmp_path):
    """The page and its plot are written after each point, also while other axes have no points."""
    model = write_tokenizer(write_model(tmp_path / "model"))
    sizes = ["--contexts", "32", "--sessions", "2", "--context", "32", "--new-tokens", "24", "--rounds", "1"]
    main(["--model-path", str(model), "--axes", "context", "sessions", *sizes])
    rows = json.loads((report_folder / "scale.json").read_text())["rows"]
    assert [(row["axis"], row["value"], "expected" in row) for row in rows] == [
        ("context", 32, True),
        ("sessions", 2, False),
    ]
    assert all(row["plain tokens/s"] > 0 and row["accept length"] >= 1.0 for row in rows)
    assert (report_folder / "scale.png").stat().st_size > 1000
