"""Steps with hidden states are captured before sessions need them; the capture is a fake that records its use."""

from dataclasses import replace

import pytest

from outrider.serving.features import FeatureSpec
from services.target.model.cuda.graphs import GraphRunner
from services.target.model.cuda.step_captures import StepCaptures
from services.target.step.batch import Capture
from tests.support.target.cuda.graphs import CPU, modules
from tests.support.target.driving import engine_of, load_model, opening
from tests.support.target.features import F32, Reader, configured, proposals_of
from tests.support.tiny import write_model

SIZES = [1, 4, 32]
SPEC = FeatureSpec((1,), final=True, format=F32)
TEXT = list(range(30, 36))


class Recorder:
    """A capturer that calls functions, as `direct`, and records captures and replays; a capture takes a second."""

    def __init__(self):
        self.events, self.time, self.refuses = [], 0.0, False

    def __call__(self, run):
        self.events.append("capture")
        self.time += 1.0
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")

        def replay():
            self.events.append("replay")
            return run()

        return replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(folder):
    return load_model(folder)


@pytest.fixture
def served(folder, plain):
    """An engine behind its warm-up, and the recorder of its captures."""
    recorder = Recorder()
    runner = GraphRunner(modules(folder), SIZES, recorder)
    engine = engine_of(replace(plain, runner=runner))
    engine.launcher.captures = StepCaptures(runner, lambda: recorder.time)
    runner.capture(engine.cache, CPU)
    assert recorder.events == ["capture"] * len(SIZES)
    recorder.events.clear()
    return engine, recorder


def read(engine, requests, proposals=None):
    """Serve sessions that want features."""
    spec = configured(engine, SPEC)
    reader = Reader(engine)
    for request in requests:
        reader.open(replace(request, feature_spec=spec))
    return reader.run(proposals)


def test_an_idle_engine_captures_before_the_first_session(plain, served):
    engine, recorder = served
    requests = [opening(i, [*TEXT, i], max_tokens=30) for i in range(1, 4)]
    right = read(engine_of(plain), requests).tokens
    expected = read(engine_of(plain), requests, proposals_of(right))
    configured(engine, SPEC)
    assert not engine.idle
    while not engine.idle:
        before = len(recorder.events)
        assert not engine.step().has_output
        assert recorder.events[before:] == ["capture"], "messages are taken between two captures"
    recorder.events.clear()
    found = read(engine, requests, proposals_of(right))
    assert "capture" not in recorder.events
    assert recorder.events.count("replay") > 3
    assert found.tokens == expected.tokens
    for request in requests:
        states = found.states(request.session_id)
        assert abs(states - expected.states(request.session_id)[: len(states)]).max() < 1e-4


def test_beside_sessions_captures_take_a_small_part_of_the_time(served):
    engine, recorder = served
    reader = Reader(engine)
    reader.open(opening(1, TEXT, max_tokens=100))
    reader.step()
    spec = configured(engine, SPEC)
    reader.step()
    assert engine.model.runner.due == len(SIZES) - 1, "one at once"
    reader.open(replace(opening(2, TEXT, max_tokens=60), feature_spec=spec))
    captured = []
    for _ in range(40):
        before = recorder.events.count("capture")
        recorder.time += 1.0
        reader.step()
        captured.append(recorder.events.count("capture") - before)
    assert max(captured) == 1
    assert sum(captured) == len(SIZES) - 1
    first, second = (i for i, count in enumerate(captured) if count)
    assert second - first >= 9
    assert engine.model.runner.due == 0
    reader.run()


def test_the_step_that_was_needed_is_captured_first(served):
    engine, recorder = served
    runner = engine.model.runner
    spec = configured(engine, SPEC)
    reader = Reader(engine)
    reader.open(replace(opening(1, TEXT, max_tokens=40), feature_spec=spec))
    for _ in range(4):
        reader.step()  # the prompt, and then one row a step
    recorder.time += 100.0
    reader.step()
    assert 1 in {key.size for key in runner.steps if key.states == (SPEC.layers, True)}
    assert runner.due
    reader.run()


def test_states_that_cannot_be_captured_leave_plain_steps_captured(served, caplog):
    engine, recorder = served
    recorder.refuses = True
    found = read(engine, [opening(1, TEXT, max_tokens=8)])
    assert len(found.states(1)) > 6
    assert "some steps with hidden states are not captured" in caplog.text
    assert engine.model.runner.due == 0
    recorder.events.clear()
    Reader(engine).open(opening(2, TEXT, max_tokens=8))
    while not engine.idle:
        engine.step()
    assert set(recorder.events) == {"replay"}


def test_steps_of_a_draft_that_was_replaced_are_dropped(served):
    engine, _ = served
    runner = engine.model.runner
    for layers in ((0,), (1,), (0, 1)):
        runner.expect(Capture(layers, False, None))
        runner.expect(Capture(layers, False, None))
        while runner.due:
            runner.capture_next()
    assert {key.states for key in runner.steps} == {((), False), ((1,), False), ((0, 1), False)}
    assert len(runner.steps) == 3 * len(SIZES)
