"""The fused speculation loop of a quantized copy, with an EAGLE head that drafts for it and without."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.sources import quantized_self_draft
from services.target.speculation.sources.quantized_self_draft import QuantizedSelfDraft
from tests.support.checkpoints.perfect import CYCLE, cycle_text, write_cyclic_target, write_perfect_eagle3
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.target.self_speculation import LONG, drafting, pending_message, recorded_iterations
from tests.support.tiny import VOCAB

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="copies are of compiled programs"),
]


@pytest.fixture(scope="module")
def both(pair):
    target, folder, _ = pair
    return load_model(
        target, self_speculation="quantized", self_speculation_format="int4", self_speculation_head=str(folder)
    )


@pytest.fixture(scope="module")
def copied(pair):
    return load_model(pair[0], self_speculation="quantized", self_speculation_format="int4")


def looping(model, **flags):
    """An engine that runs fused loops of its copy; a head drafts for the copy, predicted to pay or not."""
    engine = drafting(model, coalesce_seconds=LONG, **flags)
    if engine.speculation.chooser.source.head is not None:
        engine.speculation.chooser.source.head.pays = lambda *_: True
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [1, 16])
def test_texts_and_finish_reasons_equal_plain_decoding(both, copied, temperature, page_size):
    rng = np.random.default_rng(4)
    for i, count in enumerate((1, 2, 3, 7, 40, 90), 1):
        prompt = rng.integers(3, VOCAB, 5 * i).tolist()
        request = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count)
        expected = run(engine_of(both, page_size=page_size), [request])
        stop = expected.new[i][count // 2]
        ended = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count, stop_token_ids=(stop,))
        for model in (both, copied):
            engine = looping(model, page_size=page_size)
            loops = recorded_iterations(engine)
            found = run(engine, [request])
            assert (found.new, found.reasons) == (expected.new, expected.reasons)
            assert count < 40 or max(map(len, loops)) > 1
            found = run(looping(model, page_size=page_size), [ended])
            assert found.new[i] == expected.new[i][: expected.new[i].index(stop) + 1]
            assert found.reasons[i] == FinishReason.STOP


def chain_outcomes(engine, requests):
    """By session and length of its text: accepted tokens of the chain there, and if a token was rejected; and texts."""
    outcomes, observe = {}, engine.speculation.chooser.source.observe_loop

    def record(session, iterations, **more):
        length = session.length
        for one in iterations:
            outcomes[session.id, length] = one.accepted_chain, one.accepted_chain < one.chain
            length += one.committed
        observe(session, iterations, **more)

    engine.speculation.chooser.source.observe_loop = record
    texts = run(engine, requests).new
    return outcomes, texts


def test_a_head_does_not_change_the_draft_tokens_of_the_copy(both, copied):
    """Chains drafted with a head and without one end at the same rejected tokens, or one is longer."""
    requests = [opening(i, [5, 6, 7 + i], SamplingParams(i % 2, seed=i), max_tokens=120) for i in range(1, 9)]
    assisted, alone = ([chain_outcomes(looping(model), [one]) for one in requests] for model in (both, copied))
    compared = rejected = 0
    for (with_head, first), (without, second) in zip(assisted, alone, strict=True):
        assert first == second
        for place in with_head.keys() & without.keys():
            (accepted, ended), (other, other_ended) = with_head[place], without[place]
            compared, rejected = compared + 1, rejected + (ended and other_ended)
            if ended and other_ended:
                assert accepted == other
            elif ended or other_ended:
                assert accepted >= other if ended else other >= accepted
    assert compared > 60
    assert rejected > 20


def test_iterations_are_reported_one_by_one(both):
    engine = looping(both)
    loops = recorded_iterations(engine)
    found = run(engine, [opening(1, [5, 6, 7], SamplingParams(1.0, seed=2), max_tokens=200)])
    iterations = [one for loop in loops for one in loop]
    assert [(one.committed, one.chain, one.accepted_chain) for one in iterations] == [
        (len(commit.tokens), commit.verified, commit.accepted) for commit in found.commits[1][1 : 1 + len(iterations)]
    ]
    for one in iterations:
        assert sum(inner.committed for inner in one.inner) == one.chain
        assert one.committed == one.accepted_chain + 1 or one is iterations[-1]
        assert not one.alternatives
        assert one.draft_seconds >= sum(inner.draft_seconds + inner.verify_seconds for inner in one.inner) > 0
        for inner in one.inner:
            assert inner.accepted == inner.committed - 1
    assert any(inner.accepted for one in iterations for inner in one.inner)
    assert len({len(one.inner) for one in iterations}) > 1


def test_costs_and_acceptance_are_learned_from_loops(both):
    """Costs of the copy and of the model are learned apart; the head learns from the verification by the copy."""
    engine = looping(both)
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 64: 1.0})
    source = engine.speculation.chooser.source
    run(engine, [opening(1, [5, 6, 7], max_tokens=200)])
    for cost in (source.cost, engine.speculation.planner.budget.cost):
        assert cost.step(1, 0)[0] < 0.5, "tiny models do not take a second"
    assert source.cost is not engine.speculation.planner.budget.cost
    assert source.head.estimates.acceptance.tried > 72
    assert source.estimate.tried > 10
    assert source.head.estimates.drafting_cost(1).seconds(1) < 0.1


def test_a_perfect_head_is_accepted_by_the_copy(tmp_path):
    """With a perfect head and an accurate copy, nearly all draft tokens are accepted at both levels."""
    target = write_cyclic_target(tmp_path / "target")
    head = write_perfect_eagle3(tmp_path / "head", target)
    engine = looping(
        load_model(
            target, self_speculation="quantized", self_speculation_format="int4", self_speculation_head=str(head)
        )
    )
    loops = recorded_iterations(engine)
    found = run(engine, [opening(1, [int(CYCLE[3])] * 20, max_tokens=300)])
    assert found.new[1] == cycle_text(int(CYCLE[3]), 300)
    iterations = [one for loop in loops for one in loop]
    inner = [one for each in iterations for one in each.inner]
    assert sum(one.accepted_chain for one in iterations) == sum(one.chain for one in iterations)
    assert sum(one.accepted for one in inner) > 2 * len(inner)
    assert sum(one.accepted_chain for one in inner) > 0.98 * sum(one.chain for one in inner)


def test_head_rows_are_those_of_the_committed_text(both):
    """Also after rejected chains, keys in the head's layer equal those of a head that saw this text alone, up to the
    difference between the hidden states of the copy and of the model."""
    engine = looping(both, page_size=4)
    engine.open(opening(1, [5, 6, 7] * 5, SamplingParams(1.0, seed=8), max_tokens=150))
    loops = recorded_iterations(engine)
    for _ in range(4):
        engine.step()
    assert any(one.accepted_chain < one.chain for loop in loops for one in loop)
    kv = engine.speculation.chooser.source.head.kv
    session = engine.sessions.by_id[1].session
    known, text = kv.known_rows[1], session.tokens.tolist()
    assert len(text) - 20 < known <= len(text) - 2

    def keys(one, session, count):
        return one.cache.keys[-1].flatten(0, 1)[session.table.slots(0, count)].float().flatten(1).numpy()

    found = keys(engine, session, known)
    other = drafting(both, page_size=4)
    other.speculation.chooser.source.head.pays = lambda *_: True
    other.open(opening(2, text, max_tokens=60))
    other.step()
    other.speculation.multi_step.window = LONG
    entry = other.sessions.by_id[2].session
    other.step()
    expected = keys(other, entry, known)

    def distances(a, b):
        return np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)

    assert distances(found, expected).max() < np.quantile(distances(found[:-1], expected[1:]), 0.02)


def test_the_head_catches_up_with_a_long_prompt_in_chunks(both, monkeypatch):
    monkeypatch.setattr(quantized_self_draft, "_MAX_ITERATIONS", 1)
    engine = looping(both, chunked_prefill_size=32)
    engine.open(opening(1, list(range(3, 100)) * 2, max_tokens=200))
    while not engine.sessions.by_id[1].session.length > 194:
        engine.step()
    loops = recorded_iterations(engine)
    while not engine.idle:
        engine.step()
    drafted = [any(one.drafted for one in each.inner) for loop in loops for each in loop]
    first = drafted.index(True)
    assert first > 2, "the head writes 32 of 194 rows at a time"
    assert all(drafted[first : first + 10])


def test_a_head_that_does_not_pay_is_not_used(both):
    engine = looping(both)
    engine.speculation.chooser.source.head.pays = lambda *_: False
    loops = recorded_iterations(engine)
    run(engine, [opening(1, [5, 6, 7], max_tokens=60)])
    inner = [one for loop in loops for each in loop for one in each.inner]
    assert len(inner) > 30
    assert {(one.drafted, one.verified, one.committed) for one in inner} == {(0, 0, 1)}


def test_chains_respect_max_draft_tokens(both):
    for most in (1, 3):
        engine = looping(both)
        loops = recorded_iterations(engine)
        request = replace(opening(1, [5, 6, 7], max_tokens=60), max_draft_tokens=most)
        expected = run(engine_of(both), [request]).new
        assert run(engine, [request]).new == expected
        assert max(one.chain for loop in loops for one in loop) == most


def test_a_chain_ends_on_a_message(both):
    engine = looping(both)
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 64: 1.0})  # so that long chains would pay
    engine.speculation.chooser.source.cost = engine.speculation.planner.budget.cost.scaled(0.01)
    loops = recorded_iterations(engine)
    engine.open(opening(1, [5, 6, 7], max_tokens=60))
    engine.step()
    engine.step()
    assert len(loops[-1][0].inner) > 1
    with pending_message(engine):
        engine.step()
        assert [len(one.inner) for one in loops[-1]] == [1]


def test_no_fused_loop_for_several_sessions(both):
    requests = [opening(i, [5, 6, 7 + i], SamplingParams(1.0, seed=i), max_tokens=40) for i in (1, 2)]
    engine = looping(both)
    loops = recorded_iterations(engine)
    found = run(engine, requests)
    assert found.new == run(engine_of(both), requests).new
    assert found.accepted > 0
    looped = sum(one.committed for loop in loops for one in loop)  # once one session is left
    assert looped < 20


def test_chains_are_longer_where_a_head_makes_them_cheap(both, monkeypatch):
    engine = drafting(both)
    engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: 1.1e-3})
    source = engine.speculation.chooser.source
    source.cost = StepCost({1: 8e-4, 64: 8e-4})
    monkeypatch.setattr(QuantizedSelfDraft, "acceptance", 0.8)
    monkeypatch.setattr(source.head, "throughput", lambda *_: 1e3 / 0.2)
    cheap = source.chain_length(1, 0, 16)
    assert source.throughput(1, 0) > source.throughput(2, 0) / 2
    monkeypatch.setattr(source.head, "throughput", lambda *_: 1.0)
    assert source.chain_length(1, 0, 16) < cheap
