"""The fused speculation loop of a quantized copy: the same draft tokens and texts as steps one by one."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.sources import quantized_self_draft
from services.target.speculation.sources.quantized_self_draft import QuantizedSelfDraft
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.target.self_speculation import LONG, drafting, pending_message, recorded_iterations
from tests.support.tiny import VOCAB

pytestmark = pytest.mark.skipif(not library.available(), reason="copies are of compiled programs")


@pytest.fixture(scope="module")
def model(pair):
    return load_model(pair[0], self_speculation="quantized", self_speculation_format="int4")


def looping(model, **flags):
    """An engine that runs fused loops of its copy."""
    return drafting(model, coalesce_seconds=LONG, **flags)


def cheaply_looping(model):
    """The same with costs by which long chains pay."""
    engine = looping(model)
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 64: 1.0})
    engine.speculation.chooser.source.cost = engine.speculation.planner.budget.cost.scaled(0.01)
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.threads)])
def test_texts_and_finish_reasons_equal_plain_decoding(model, temperature, page_size):
    rng = np.random.default_rng(4)
    for i, count in enumerate((1, 2, 3, 7, 40, 90), 1):
        prompt = rng.integers(3, VOCAB, 5 * i).tolist()
        request = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count)
        expected = run(engine_of(model, page_size=page_size), [request])
        engine = looping(model, page_size=page_size)
        loops = recorded_iterations(engine)
        found = run(engine, [request])
        assert (found.new, found.reasons) == (expected.new, expected.reasons)
        assert count < 40 or max(map(len, loops)) > 1
        stop = expected.new[i][count // 2]
        ended = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count, stop_token_ids=(stop,))
        found = run(looping(model, page_size=page_size), [ended])
        assert found.new[i] == expected.new[i][: expected.new[i].index(stop) + 1]
        assert found.reasons[i] == FinishReason.STOP


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_iteration_verifies_the_draft_tokens_of_a_step(model, monkeypatch, temperature):
    """Chains of equal length, iteration by iteration, beside an engine that drafts before each step."""
    monkeypatch.setattr(quantized_self_draft, "MAX_ITERATIONS", 1)
    monkeypatch.setattr(QuantizedSelfDraft, "chain_length", lambda _, sessions, kv_tokens, most, *__: min(most, 5))
    stepping, looped = drafting(model), looping(model)
    loops, outcomes = recorded_iterations(looped), set()
    for engine in (stepping, looped):
        engine.open(opening(1, [5, 6, 7, 8], SamplingParams(temperature, seed=3), max_tokens=120))
        engine.step()
    while not stepping.idle:
        commit, other = stepping.step().commits[0], looped.step().commits[0]
        assert (other.tokens.tolist(), other.verified, other.accepted) == (
            commit.tokens.tolist(), commit.verified, commit.accepted,
        )  # fmt: skip
        outcomes.add(commit.accepted)
    assert looped.idle
    assert len(outcomes) > 2, "draft tokens are accepted and rejected"
    assert len(loops) > 20


def test_iterations_are_reported_one_by_one(model):
    engine = looping(model)
    loops = recorded_iterations(engine)
    found = run(engine, [opening(1, [5, 6, 7], SamplingParams(1.0, seed=2), max_tokens=200)])
    iterations = [one for loop in loops for one in loop]
    assert [(one.committed, one.verified, one.accepted) for one in iterations] == [
        (len(commit.tokens), commit.verified, commit.accepted) for commit in found.commits[1][1 : 1 + len(iterations)]
    ]
    for one in iterations:
        assert one.committed == one.accepted + 1 or one is iterations[-1]
        assert one.drafted == one.verified > 0
        assert one.draft_seconds > 0
        assert one.verify_seconds > 0


def test_costs_and_acceptance_are_learned_from_loops(model):
    """Costs of the copy and of the model are learned apart."""
    engine = looping(model)
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 64: 1.0})
    source = engine.speculation.chooser.source
    run(engine, [opening(1, [5, 6, 7], max_tokens=200)])
    for cost in (source.cost, engine.speculation.planner.budget.cost):
        assert cost.step(1, 0)[0] < 0.5, "tiny models do not take a second"
    assert source.cost is not engine.speculation.planner.budget.cost
    assert source.estimate.tried > 10


def test_chains_respect_max_draft_tokens(model):
    for most in (1, 3):
        engine = cheaply_looping(model)
        loops = recorded_iterations(engine)
        request = replace(opening(1, [5, 6, 7], max_tokens=60), max_draft_tokens=most)
        expected = run(engine_of(model), [request]).new
        assert run(engine, [request]).new == expected
        assert max(one.verified for loop in loops for one in loop) == most


def test_a_chain_ends_on_a_message(model):
    engine = cheaply_looping(model)
    loops = recorded_iterations(engine)
    engine.open(opening(1, [5, 6, 7], max_tokens=60))
    engine.step()
    engine.step()
    assert loops[-1][0].drafted > 1
    with pending_message(engine):
        engine.step()
        assert [one.drafted for one in loops[-1]] == [1]


def test_no_fused_loop_for_several_sessions(model):
    requests = [opening(i, [5, 6, 7 + i], SamplingParams(1.0, seed=i), max_tokens=40) for i in (1, 2)]
    engine = looping(model)
    loops = recorded_iterations(engine)
    found = run(engine, requests)
    assert found.new == run(engine_of(model), requests).new
    assert found.accepted > 0
    looped = sum(one.committed for loop in loops for one in loop)  # once one session is left
    assert looped < 20
