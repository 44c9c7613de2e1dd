"""Multi-step decoding: the same texts as single steps, and it ends as soon as there is other work."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from outrider.serving.features import FeatureSpec
from outrider.serving.inbox import Inbox
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Message
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.process.warmup import warm_up
from tests.support.target.driving import chain, engine_of, load_model, load_modules, opening, run
from tests.support.target.self_speculation import LONG, PausedPolicy
from tests.support.tiny import VOCAB, write_model

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="multi-step decoding needs compiled programs"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def sessions(count, temperature=1.0, seed=0, stops=12):
    """Sessions of different lengths; some end by a stop token, some by max_tokens."""
    rng = np.random.default_rng(seed)
    for i in range(1, count + 1):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 70)).tolist()
        params = SamplingParams(temperature, seed=i, top_p=[1.0, 0.9][i % 2], top_k=[0, 0, 40][i % 3])
        ids = tuple(rng.integers(3, VOCAB, stops).tolist())
        yield opening(i, prompt, params, max_tokens=int(rng.integers(1, 60)), stop_token_ids=ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("flags", [{}, {"page_size": 1}, {"page_size": 64}, {"disable_radix_cache": True}])
def test_texts_and_finish_reasons_equal_single_steps(model, temperature, flags):
    one = opening(1, [5, 6, 7], SamplingParams(temperature, seed=9), max_tokens=50)
    for requests in (list(sessions(9, temperature)), [one]):
        expected = run(engine_of(model, **flags), requests)
        found = run(engine_of(model, coalesce_seconds=LONG, **flags), requests)
        assert (found.new, found.reasons) == (expected.new, expected.reasons)
        assert found.steps < expected.steps
        assert max(len(commit.tokens) for commits in found.commits.values() for commit in commits) > 3


def test_texts_and_finish_reasons_equal_single_steps_in_bfloat16(folder):
    model = load_model(folder, dtype="bfloat16")
    requests = list(sessions(6))
    expected = run(engine_of(model), requests)
    found = run(engine_of(model, coalesce_seconds=LONG), requests)
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert set(found.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("prompt", [[5], list(range(5, 5 + 33))], ids=["a token", "cached but for a token"])
def test_a_first_token_is_committed_by_a_single_step(model, prompt):
    engine = engine_of(model, coalesce_seconds=LONG)
    run(engine, [opening(1, prompt, max_tokens=2)])
    engine.open(opening(2, prompt, max_tokens=60))
    sizes = [[len(commit.tokens) for commit in engine.step().commits] for _ in range(2)]
    assert sizes[0] == [1]
    assert sizes[1][0] > 1


def test_cached_pages_serve_later_sessions(model):
    prompt = list(range(5, 40))
    expected = run(engine_of(model, page_size=4), [opening(1, prompt, max_tokens=40)]).new[1]
    engine = engine_of(model, page_size=4, coalesce_seconds=LONG)
    assert run(engine, [opening(1, prompt, max_tokens=40)]).new[1] == expected
    engine.open(opening(2, prompt, max_tokens=40, committed=expected[:38]))
    assert engine.step().commits[0].tokens.tolist() == expected[38:39]
    assert engine.load().step_tokens <= 4, "all pages but the last are cached"
    assert engine.step().commits[0].tokens.tolist() == expected[39:]


def test_preemption_leaves_texts_unchanged(model):
    requests = [opening(i, [4 + i] * 9, SamplingParams(1.0, seed=i), max_tokens=30) for i in range(6)]
    expected = run(engine_of(model), requests).new
    engine = engine_of(model, page_size=4, max_total_tokens=72, coalesce_seconds=LONG)
    assert run(engine, requests).new == expected
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("penalties", {}), ("logprobs", {"logprobs": 2}), ("min_tokens", {"min_tokens": 9})],
)
def test_requests_beyond_tokens_are_served_step_by_step(model, name, options):
    params = SamplingParams(1.0, seed=4, presence_penalty=1.0 if name == "penalties" else 0.0)
    requests = [opening(1, [5, 6, 7], params, **options), *list(sessions(2))[1:]]
    expected = run(engine_of(model), requests)
    found = run(engine_of(model, coalesce_seconds=LONG), requests)
    assert found.new == expected.new
    assert all(len(commit.tokens) == 1 for commit in found.commits[1])


def test_runners_without_programs_compute_single_steps(folder):
    model = load_modules(folder)
    requests = list(sessions(3))
    expected = run(engine_of(model), requests)
    found = run(engine_of(model, coalesce_seconds=LONG), requests)
    assert (found.new, found.steps) == (expected.new, expected.steps)


def test_single_steps_once_a_drafter_answers(model):
    engine = engine_of(model, coalesce_seconds=LONG)
    engine.open(opening(1, [5, 6, 7], max_tokens=60))
    tokens = [5, 6, 7]
    while len(tokens) < 8:
        tokens += engine.step().commits[0].tokens.tolist()
    engine.receive([chain(1, tokens, [3, 4])], ())
    sizes = [len(engine.step().commits[0].tokens) for _ in range(8)]
    assert max(sizes) <= 3, "a drafter has answered, and steps wait for its proposals"


def test_hidden_states_equal_single_steps(model):
    def states(window):
        engine = engine_of(model, coalesce_seconds=window)
        spec = FeatureSpec((0, 1), final=True)
        engine.features.configure(7, spec, b"")
        engine.open(replace(opening(1, list(range(4, 30)), max_tokens=50), feature_spec=7))
        rows, longest, count = {}, 0, 0
        engine.speculation.policy = policy = PausedPolicy()
        while not engine.idle:
            output = engine.step()
            count += sum(len(commit.tokens) for commit in output.commits)
            if count > 40:
                policy.want_drafts()
            longest = max(longest, *(len(commit.tokens) for commit in output.commits))
            for block in output.features:
                for i, row in enumerate(block.rows):
                    assert block.first + i not in rows
                    rows[block.first + i] = row.tobytes()
        return rows, longest

    (expected, one), (found, many) = states(0.0), states(LONG)
    assert one == 1
    assert many > 3
    assert found == expected
    assert len(found) > 70


def test_multi_step_decoding_ends_on_a_message(model):
    engine = engine_of(model, coalesce_seconds=LONG)
    inbox = Inbox()
    inbox.open()
    engine.open(opening(1, [5, 6, 7], max_tokens=200))
    while not engine.step().commits:
        pass
    engine.message_files = inbox.message_files
    assert len(engine.step().commits[0].tokens) == 16
    inbox.put("message")  # before the call begins
    assert len(engine.step().commits[0].tokens) == 1
    assert inbox.get() == "message"
    assert len(engine.step().commits[0].tokens) == 16

    @contextmanager
    def message_during_the_call():
        with inbox.message_files() as files:
            inbox.put("message")  # during the call
            yield files

    engine.message_files = message_during_the_call
    assert len(engine.step().commits[0].tokens) == 1
    assert inbox.get() == "message"

    @contextmanager
    def proposal_during_the_call():
        with inbox.message_files() as files:
            inbox.put("proposal", interrupts=False)
            yield files

    engine.message_files = proposal_during_the_call
    assert len(engine.step().commits[0].tokens) == 16
    assert inbox.get() == "proposal"
    inbox.close()


def test_the_engine_loop_takes_messages_during_multi_step_decoding(model):
    requests = list(sessions(12))
    expected = run(engine_of(model), requests).new
    found, ended, done = {request.session_id: [] for request in requests}, set(), threading.Event()

    def publish(output):
        for commit in output.commits:
            found[commit.session_id] += commit.tokens.tolist()
            if commit.finish_reason != FinishReason.RUNNING:
                ended.add(commit.session_id)
        if len(ended) == len(requests):
            done.set()

    loop = EngineLoop(on_fault=lambda error: done.set())
    loop.start(engine_of(model, coalesce_seconds=0.016), publish)
    for request in requests:
        loop.submit(Message(opens=[request]))
    assert done.wait(60)
    assert loop.call(lambda: loop.engine.check()).result(10) is None
    loop.stop()
    assert loop.fault is None
    assert found == expected


def test_the_warm_up_measures_single_steps(model):
    engine = engine_of(model, coalesce_seconds=LONG)
    step, steps = engine.step, []

    def counted():
        output = step()
        steps.append(output.steps)
        return output

    engine.step = counted
    warm_up(engine)
    assert len(steps) > 30
    assert set(steps) == {1}
    engine.open(opening(1, [5, 6, 7], max_tokens=40))
    while not engine.idle:
        engine.step()
    assert max(steps) > 3
