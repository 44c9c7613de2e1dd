"""The costs of steps are kept for the next start, found damaged, and measured again while no session has come."""

import asyncio
import json
import os

import pytest

from outrider.config import TargetConfig
from outrider.serving.loop import EngineLoop
from services.target.process import kept_costs
from services.target.process.costs import CostMeter
from services.target.process.kept_costs import KeptCosts, measure_again, starting_cost
from services.target.process.warmup import warm_up
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(kept_costs, "_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(kept_costs, "_PAUSE", 0.0)


def kept_of(folder, **flags):
    return KeptCosts(folder, TargetConfig(**flags))


def test_a_later_start_reads_what_the_first_one_measured(model, folder, monkeypatch):
    first = starting_cost(engine_of(model), kept_of(folder), passes=3)
    monkeypatch.setattr(CostMeter, "time", None)  # nothing is measured
    second = starting_cost(engine_of(model), kept_of(folder), passes=3)
    assert second.describe() == first.describe()


def test_each_model_and_set_of_flags_has_its_own_file(folder, tmp_path):
    flags = [{}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"page_size": 32}]
    paths = {kept_of(folder, **one).path for one in flags}
    other = write_model(tmp_path / "other", seed=1)
    assert len(paths | {kept_of(other).path}) == len(flags) + 1
    assert kept_of(folder, listen="unix:/x", log_level="debug").path in paths


def changed(content):
    content["seconds"][0][2] *= 2
    return json.dumps(content)


@pytest.mark.parametrize("damage", [lambda c: json.dumps(c)[:40], changed, lambda c: "[]", lambda c: " " * 70_000])
def test_a_damaged_file_is_measured_again(model, folder, damage):
    kept, engine = kept_of(folder), engine_of(model)
    starting_cost(engine, kept, passes=1)
    kept.path.write_text(damage(json.loads(kept.path.read_text())))
    points = CostMeter(engine).points
    assert kept.read(points) is None
    assert starting_cost(engine, kept, passes=1) is not None
    assert kept.read(points)
    assert kept.read(points[1:]) is None  # of other points


def test_the_oldest_files_are_removed(folder, monkeypatch):
    monkeypatch.setattr(kept_costs, "_MOST_FILES", 2)
    written = []
    for age, size in enumerate((8, 16, 32)):
        kept = kept_of(folder, page_size=size)
        kept.write({})
        os.utime(kept.path, (age, age))
        written.append(kept.path)
    kept.write({})
    assert [path.exists() for path in written] == [False, True, True]


def test_measuring_leaves_nothing_behind(model):
    prompt = [opening(1, [0] * 40)]  # the measured sessions have such tokens, too
    expected = run(engine_of(model), prompt).new
    engine = engine_of(model)
    free = engine.load().free_pages
    meter = CostMeter(engine)
    assert meter.measure(1) is not None
    assert engine.load().free_pages == free
    assert run(engine, prompt).new == expected
    engine.check()


def test_steps_that_other_work_slowed_are_measured_again(model, monkeypatch):
    meter = CostMeter(engine_of(model))
    times = {
        point: [0.5 if point.tokens == 2 else 0.001 * point.tokens, 0.001 * point.tokens] for point in meter.points
    }
    monkeypatch.setattr(meter, "_timed", lambda kv_tokens, tokens: times[kv_tokens, tokens].pop(0))
    assert meter.measure(1).step(2, 0)[0] == pytest.approx(0.002)
    assert not any(times.values())
    assert not meter.disturbed


def served(engine, work):
    """Run `work` with the loop of an engine."""
    loop = EngineLoop(lambda _: None)
    loop.start(engine, lambda _: None)
    try:
        asyncio.run(asyncio.wait_for(work(loop), 60))
    finally:
        loop.stop()
    assert loop.fault is None


def test_costs_are_measured_again_while_no_session_has_come(model, folder):
    engine, kept = engine_of(model), kept_of(folder)
    warm_up(engine, kept)
    points = CostMeter(engine).points
    slow = dict.fromkeys(points, 10.0)
    kept.write(slow)  # as on a machine that was busy at the time
    warm_up(engine, kept)
    assert engine.speculation.planner.budget.cost.step(1, 0)[0] == pytest.approx(10.0)
    served(engine, lambda loop: measure_again(loop, engine, kept))
    assert engine.speculation.planner.budget.cost.step(1, 0)[0] < 5.0
    assert max(kept.read(points).values()) < 10.0


def test_a_slower_measurement_counts_by_degrees(model, folder, monkeypatch):
    engine, kept = engine_of(model), kept_of(folder)
    warm_up(engine, kept)
    points = CostMeter(engine).points
    kept.write(dict.fromkeys(points, 0.010))
    warm_up(engine, kept)
    monkeypatch.setattr(CostMeter, "_timed", lambda *_: 10.0)  # as on a machine that is busy all the time
    for expected in (0.011, 0.0121, 0.01331):  # a tenth more at each start
        served(engine, lambda loop: measure_again(loop, engine, kept))
        assert max(kept.read(points).values()) == pytest.approx(expected)
        assert engine.speculation.planner.budget.cost.step(1, 0)[0] == pytest.approx(expected)


def test_a_session_ends_the_measurement(model, folder):
    engine, kept = engine_of(model), kept_of(folder)
    warm_up(engine, kept)
    points = CostMeter(engine).points
    kept.write(dict.fromkeys(points, 10.0))
    engine.open(opening(1, [5, 6, 7]))
    served(engine, lambda loop: measure_again(loop, engine, kept))
    assert set(kept.read(points).values()) == {10.0}
