"""Rounds of a narrow copy in one go, with a head that guesses for it and without: no other text, and no other chain."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.sources import quantized_self_draft as copydraft
from services.target.speculation.sources.quantized_self_draft import QuantizedSelfDraft
from tests.support.checkpoints.heads import write_pair
from tests.support.checkpoints.perfect import CYCLE, cycle_text, write_cyclic_target, write_perfect_eagle3
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.tiny import VOCAB
from tests.target.speculation.test_fused_loop import LONG, calling, watched
from tests.target.speculation.test_local_eagle_head import LAYERS, drafting

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="copies are of compiled programs"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), "EAGLE3", eagle_aux_hidden_state_layer_ids=LAYERS)


@pytest.fixture(scope="module")
def both(pair):
    target, folder, _ = pair
    return load_model(
        target, self_speculation="quantized", self_speculation_format="int4", self_speculation_head=str(folder)
    )


@pytest.fixture(scope="module")
def copied(pair):
    return load_model(pair[0], self_speculation="quantized", self_speculation_format="int4")


def in_rounds(model, **flags):
    """An engine whose copy drafts in one go with its verification; a head guesses for it, whether that pays or not."""
    engine = drafting(model, coalesce_seconds=LONG, **flags)
    if engine.speculation.chooser.source.head is not None:
        engine.speculation.chooser.source.head.pays = lambda *_: True
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [1, 16])
def test_texts_and_ends_are_those_of_plain_steps(both, copied, temperature, page_size):
    rng = np.random.default_rng(4)
    for i, count in enumerate((1, 2, 3, 7, 40, 90), 1):
        prompt = rng.integers(3, VOCAB, 5 * i).tolist()
        request = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count)
        expected = run(engine_of(both, page_size=page_size), [request])
        stop = expected.new[i][count // 2]
        ended = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count, stop_token_ids=(stop,))
        for model in (both, copied):
            engine = in_rounds(model, page_size=page_size)
            told = watched(engine)
            found = run(engine, [request])
            assert (found.new, found.reasons) == (expected.new, expected.reasons)
            assert count < 40 or max(map(len, told)) > 1
            found = run(in_rounds(model, page_size=page_size), [ended])
            assert found.new[i] == expected.new[i][: expected.new[i].index(stop) + 1]
            assert found.reasons[i] == FinishReason.STOP


def chains(engine, requests):
    """What became of a chain, by the session and the length of its text: right guesses, and if another was wrong."""
    came, learn = {}, engine.speculation.chooser.source.observe_loop

    def learning(session, rounds, **more):
        length = session.length
        for one in rounds:
            came[session.id, length] = one.accepted_chain, one.accepted_chain < one.chain
            length += one.committed
        learn(session, rounds, **more)

    engine.speculation.chooser.source.observe_loop = learning
    said = run(engine, requests).new
    return came, said


def test_a_head_changes_no_chain(both, copied):
    """Whoever guesses for it, the copy says what it says: chains end at the same wrong tokens, or are longer."""
    requests = [opening(i, [5, 6, 7 + i], SamplingParams(i % 2, seed=i), max_tokens=120) for i in range(1, 9)]
    guessed, alone = ([chains(in_rounds(model), [one]) for one in requests] for model in (both, copied))
    compared = wrong = 0
    for (with_head, first), (without, second) in zip(guessed, alone, strict=True):
        assert first == second
        for place in with_head.keys() & without.keys():
            (right, ended), (other, other_ended) = with_head[place], without[place]
            compared, wrong = compared + 1, wrong + (ended and other_ended)
            if ended and other_ended:
                assert right == other
            elif ended or other_ended:
                assert right >= other if ended else other >= right
    assert compared > 60
    assert wrong > 20


def test_rounds_are_told_one_by_one(both):
    engine = in_rounds(both)
    told = watched(engine)
    found = run(engine, [opening(1, [5, 6, 7], SamplingParams(1.0, seed=2), max_tokens=200)])
    rounds = [one for some in told for one in some]
    assert [(one.committed, one.chain, one.accepted_chain) for one in rounds] == [
        (len(commit.tokens), commit.verified, commit.accepted) for commit in found.commits[1][1 : 1 + len(rounds)]
    ]
    for one in rounds:
        assert sum(inner.committed for inner in one.inner) == one.chain
        assert one.committed == one.accepted_chain + 1 or one is rounds[-1]
        assert not one.alternatives
        assert one.draft_seconds >= sum(inner.draft_seconds + inner.verify_seconds for inner in one.inner) > 0
        for inner in one.inner:
            assert inner.accepted == inner.committed - 1
    assert any(inner.accepted for one in rounds for inner in one.inner)
    assert len({len(one.inner) for one in rounds}) > 1


def test_what_is_measured_is_learned(both):
    """Steps of the copy and of the model apart, and the head's odds by what the copy said."""
    engine = in_rounds(both)
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 64: 1.0})
    mine = engine.speculation.chooser.source
    run(engine, [opening(1, [5, 6, 7], max_tokens=200)])
    for cost in (mine.cost, engine.speculation.planner.budget.cost):
        assert cost.step(1, 0)[0] < 0.5, "tiny models do not take a second"
    assert mine.cost is not engine.speculation.planner.budget.cost
    assert sum(mine.head.acceptance._estimate._tried) > 72
    assert mine._estimate._tried[0] > 10
    assert mine.head._cost(1).step(1, 0)[0] < 0.1


def test_what_can_be_known_is_known(tmp_path):
    """A perfect head for a copy that is right: its rows, states and tokens are in their places all along."""
    target = write_cyclic_target(tmp_path / "target")
    head = write_perfect_eagle3(tmp_path / "head", target)
    engine = in_rounds(
        load_model(
            target, self_speculation="quantized", self_speculation_format="int4", self_speculation_head=str(head)
        )
    )
    told = watched(engine)
    found = run(engine, [opening(1, [int(CYCLE[3])] * 20, max_tokens=300)])
    assert found.new[1] == cycle_text(int(CYCLE[3]), 300)
    rounds = [one for some in told for one in some]
    inner = [one for each in rounds for one in each.inner]
    assert sum(one.accepted_chain for one in rounds) == sum(one.chain for one in rounds)
    assert sum(one.accepted for one in inner) > 2 * len(inner)
    assert sum(one.accepted_chain for one in inner) > 0.98 * sum(one.chain for one in inner)


def test_rows_of_the_head_are_of_the_committed_text(both):
    """Behind chains that were wrong, too: keys in its layer are those of a head that saw this text alone, but for what
    the copy's states are off by."""
    engine = in_rounds(both, page_size=4)
    engine.open(opening(1, [5, 6, 7] * 5, SamplingParams(1.0, seed=8), max_tokens=150))
    told = watched(engine)
    for _ in range(4):
        engine.step()
    assert any(one.accepted_chain < one.chain for some in told for one in some)
    rows = engine.speculation.chooser.source.head.rows
    session = engine.sessions.by_id[1].session
    known, text = rows._known[1], session.tokens.tolist()
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

    def off(a, b):
        return np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)

    assert off(found, expected).max() < np.quantile(off(found[:-1], expected[1:]), 0.02), "other rows are far"


def test_a_long_prompt_is_written_in_pieces_before_the_head_guesses(both, monkeypatch):
    monkeypatch.setattr(copydraft, "_MAX_ITERATIONS", 1)
    engine = in_rounds(both, chunked_prefill_size=32)
    engine.open(opening(1, list(range(3, 100)) * 2, max_tokens=200))
    while not engine.sessions.by_id[1].session.length > 194:
        engine.step()
    told = watched(engine)
    while not engine.idle:
        engine.step()
    guessed = [any(one.drafted for one in each.inner) for some in told for each in some]
    first = guessed.index(True)
    assert first > 2, "32 of 194 rows at a time"
    assert all(guessed[first : first + 10])


def test_a_head_that_does_not_pay_is_not_asked(both):
    engine = in_rounds(both)
    engine.speculation.chooser.source.head.pays = lambda *_: False
    told = watched(engine)
    run(engine, [opening(1, [5, 6, 7], max_tokens=60)])
    inner = [one for some in told for each in some for one in each.inner]
    assert len(inner) > 30
    assert {(one.drafted, one.verified, one.committed) for one in inner} == {(0, 0, 1)}


def test_no_longer_than_a_session_allows(both):
    for most in (1, 3):
        engine = in_rounds(both)
        told = watched(engine)
        request = replace(opening(1, [5, 6, 7], max_tokens=60), max_draft_tokens=most)
        expected = run(engine_of(both), [request]).new
        assert run(engine, [request]).new == expected
        assert max(one.chain for some in told for one in some) == most


def test_a_chain_ends_when_somebody_calls(both):
    engine = in_rounds(both)
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 64: 1.0})  # so that long chains would pay
    engine.speculation.chooser.source._cost = engine.speculation.planner.budget.cost.scaled(0.01)
    told = watched(engine)
    engine.open(opening(1, [5, 6, 7], max_tokens=60))
    engine.step()
    engine.step()
    assert len(told[-1][0].inner) > 1
    with calling(engine):
        engine.step()
        assert [len(one.inner) for one in told[-1]] == [1]


def test_several_sessions_are_drafted_for_by_the_copy_alone(both):
    requests = [opening(i, [5, 6, 7 + i], SamplingParams(1.0, seed=i), max_tokens=40) for i in (1, 2)]
    engine = in_rounds(both)
    told = watched(engine)
    found = run(engine, requests)
    assert found.new == run(engine_of(both), requests).new
    assert found.accepted > 0
    rest = sum(one.committed for some in told for one in some)  # of the one that is left
    assert rest < 20


def test_chains_are_longer_where_a_head_makes_them_cheap(both, monkeypatch):
    engine = drafting(both)
    engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: 1.1e-3})
    draft = engine.speculation.chooser.source
    draft._cost = StepCost({1: 8e-4, 64: 8e-4})
    monkeypatch.setattr(QuantizedSelfDraft, "acceptance", 0.8)
    monkeypatch.setattr(draft.head, "throughput", lambda *_: 1e3 / 0.2)
    cheap = draft._length(1, 0, 16)
    assert draft.throughput(1, 0) > draft.throughput(2, 0) / 2
    monkeypatch.setattr(draft.head, "throughput", lambda *_: 1.0)
    assert draft._length(1, 0, 16) < cheap
