"""The fused speculation loop of a local EAGLE head: the same draft tokens and texts as steps one by one."""

from array import array
from dataclasses import replace

import numpy as np
import pytest

from outrider.serving.features import FeatureSpec
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.sources import local_eagle_head
from services.target.step.programs import DraftTokenValue
from tests.support.checkpoints.perfect import CYCLE, cycle_text, write_cyclic_target, write_perfect_eagle3
from tests.support.draft.twins.heads import Twin
from tests.support.target.driving import engine_of, opening, run
from tests.support.target.self_speculation import (
    LONG,
    PausedPolicy,
    check_draft_tokens,
    drafting,
    pending_message,
    recorded_iterations,
    with_head,
)
from tests.support.tiny import VOCAB

pytestmark = pytest.mark.skipif(not library.available(), reason="heads are of compiled programs")


@pytest.fixture(scope="module")
def perfect(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perfect")
    target = write_cyclic_target(folder / "target")
    return with_head(target, write_perfect_eagle3(folder / "head", target))


def without_learning(engine, value):
    """An engine with fixed acceptance rates and a fixed value of draft tokens, so that two engines choose alike."""
    estimates = engine.speculation.chooser.source.estimates
    estimates.token_value = lambda *_: value
    estimates.acceptance.observe = lambda *_, **__: None
    estimates.acceptance.table[:] = array("f", np.linspace(0.3, 0.98, 32))
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("token_cost", [0.001, 0.03, 0.2])
def test_an_iteration_verifies_the_draft_tokens_of_a_step(pair, monkeypatch, temperature, token_cost):
    """Chains, iteration by iteration, beside an engine that drafts before each step."""
    monkeypatch.setattr(local_eagle_head, "MAX_ITERATIONS", 1)
    target, folder, _ = pair
    model, value = with_head(target, folder), DraftTokenValue(0.6, 1.0, token_cost, 0.01)
    stepping, looping = (
        without_learning(drafting(model, **flags), value) for flags in ({}, {"coalesce_seconds": LONG})
    )
    request = opening(1, [5, 6, 7, 8], SamplingParams(temperature, seed=3), max_tokens=120)
    loops, lengths = recorded_iterations(looping), set()
    for engine in (stepping, looping):
        engine.open(request)
        engine.step()
    source, verified = stepping.speculation.chooser.source, []
    draft_step = source.draft
    source.draft = lambda *args: verified.append(draft_step(*args)) or verified[-1]
    while not stepping.idle:
        verified.clear()
        commit, other = stepping.step().commits[0], looping.step().commits[0]
        assert (other.tokens.tolist(), other.accepted) == (commit.tokens.tolist(), commit.accepted)
        draft = verified[0].get(1) if verified else None
        if draft is None:  # one token is left, so that there is no room for draft tokens
            continue
        (one,) = loops[-1]
        assert one.verified == len(draft)
        rates = [
            source.estimates.acceptance.rate(probability, greedy=not temperature) for probability in one.probabilities
        ]
        assert np.cumprod(rates) == pytest.approx(np.exp(draft.path_scores))
        lengths.add(one.verified)
    assert len(lengths) > (1 if token_cost < 0.2 else 0)
    assert looping.idle


def test_no_fused_loop_with_acceptance_thresholds(perfect):
    engine = drafting(perfect, coalesce_seconds=LONG, speculative_accept_threshold_single=0.9)
    loops = recorded_iterations(engine)
    found = run(engine, [opening(1, CYCLE[:3], SamplingParams(1.0, seed=1), max_tokens=40)])
    assert len(found.new[1]) == 40
    assert found.accepted > 0
    assert not loops


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.threads), 64])
def test_texts_and_finish_reasons_equal_plain_decoding(pair, temperature, page_size):
    """Draft tokens of a random head, accepted and rejected ones; sessions end by length and by a stop token."""
    target, folder, _ = pair
    model = with_head(target, folder)
    rng = np.random.default_rng(4)
    for i, count in enumerate((1, 2, 3, 7, 40, 90), 1):
        prompt = rng.integers(3, VOCAB, 5 * i).tolist()
        request = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count)
        expected = run(engine_of(model, page_size=page_size), [request])
        engine = drafting(model, page_size=page_size, coalesce_seconds=LONG)
        loops = recorded_iterations(engine)
        found = run(engine, [request])
        assert (found.new, found.reasons) == (expected.new, expected.reasons)
        assert count < 40 or max(map(len, loops)) > 1
        stop = expected.new[i][count // 2]
        ended = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count, stop_token_ids=(stop,))
        found = run(drafting(model, page_size=page_size, coalesce_seconds=LONG), [ended])
        assert found.new[i] == expected.new[i][: expected.new[i].index(stop) + 1]
        assert found.reasons[i] == FinishReason.STOP


@pytest.mark.threads
def test_a_perfect_head_is_accepted_in_every_iteration(perfect):
    engine = drafting(perfect, coalesce_seconds=LONG)
    loops = recorded_iterations(engine)
    found = run(engine, [opening(1, [int(CYCLE[3])] * 20, max_tokens=300)])
    assert found.new[1] == cycle_text(int(CYCLE[3]), 300)
    assert found.accepted > 260
    assert found.steps < 20, "a loop has up to eight iterations"
    iterations = [one for loop in loops for one in loop]
    assert sum(one.committed for one in iterations) == 299, "all but the first token, which follows the prompt"
    assert sum(one.accepted for one in iterations) == found.accepted
    committed = [(len(commit.tokens), commit.verified, commit.accepted) for commit in found.commits[1][1:]]
    assert committed == [(one.committed, one.verified, one.accepted) for one in iterations], "one commit an iteration"
    assert all(one.draft_seconds > 0 and one.verify_seconds > 0 for one in iterations)


def test_a_loop_ends_on_a_message_and_at_the_end_of_the_window(perfect):
    engine = drafting(perfect, coalesce_seconds=LONG)
    loops = recorded_iterations(engine)
    with pending_message(engine) as read_message:
        engine.open(opening(1, [int(CYCLE[3])] * 20, max_tokens=600))
        for _ in range(3):
            engine.step()
        assert [len(loop) for loop in loops] == [1, 1]
        read_message()
        engine.step()
        assert len(loops[-1]) == local_eagle_head.MAX_ITERATIONS
        engine.speculation.multi_step.window = 1e-9
        engine.step()
        assert len(loops[-1]) == 1


def test_a_loop_ends_where_prompt_lookup_finds_a_match(perfect):
    engine = drafting(perfect, coalesce_seconds=LONG)
    loops = recorded_iterations(engine)
    engine.open(opening(1, [int(CYCLE[3])] * 20, max_tokens=600))
    engine.step()
    chooser = engine.speculation.chooser
    chooser.looks_up, chooser.lookup.min_match = True, 2  # tokens: the cycle matches from its second repetition on
    chooser.lookup.draft = lambda *_: {}
    while len(loops) < 40 and not engine.idle:
        engine.step()
    assert len(loops[0]) > 1
    assert {len(loop) for loop in loops[2:]} == {1}


@pytest.mark.usefixtures("exact")
def test_rows_written_in_a_loop_are_used_afterwards(pair):
    """After loops the head drafts as its twin does, from rows written in them, also by another session."""
    target, folder, made = pair
    twin = Twin.of("EAGLE3", *made, target)
    engine = drafting(with_head(target, folder), coalesce_seconds=LONG)
    kv, prompt = engine.speculation.chooser.source.kv, [5, 6, 7] * 9
    engine.open(opening(1, prompt, max_tokens=100))
    text = [*prompt]
    for _ in range(3):
        text += [token for commit in engine.step().commits for token in commit.tokens.tolist()]
    assert kv.known_rows[1] > len(prompt) + 4
    assert len(text) - 20 < kv.known_rows[1] < len(text) - 1
    engine.speculation.multi_step.window = 0.0
    assert check_draft_tokens(twin, engine)[1] > 0
    engine.abort()
    engine.step()  # reports the aborts
    engine.open(opening(2, text[:-4], max_tokens=20))
    engine.step()
    assert kv.known_rows[2] >= 16, "cached pages of the first session, whose rows the head has written"
    assert check_draft_tokens(twin, engine)[1] > 0


def test_no_fused_loop_for_several_sessions_or_penalties(pair):
    target, folder, _ = pair
    model = with_head(target, folder)
    engine = drafting(model, coalesce_seconds=LONG)
    loops = recorded_iterations(engine)
    requests = [opening(i, [4 + i] * 9, SamplingParams(1.0, seed=i), max_tokens=30) for i in (1, 2)]
    for request in requests:
        engine.open(request)
    for _ in range(5):
        engine.step()
    assert not loops
    engine.close(2)
    engine.step()
    assert len(loops) == 1
    engine.close(1)
    penalized = replace(requests[0], sampling=SamplingParams(1.0, seed=1, presence_penalty=1.0))
    assert run(engine, [penalized]).new == run(engine_of(model), [penalized]).new
    assert len(loops) == 1, "penalties change with each token"


def test_no_fused_loop_where_hidden_states_are_requested(pair):
    """A loop returns no hidden states, which a feature-based drafter may request later."""
    target, folder, _ = pair
    engine = drafting(with_head(target, folder), coalesce_seconds=LONG)
    loops = recorded_iterations(engine)
    engine.features.configure(7, FeatureSpec((0, 1), final=True), b"")
    engine.open(replace(opening(1, list(range(4, 30)), max_tokens=40), feature_spec=7))
    engine.speculation.policy = policy = PausedPolicy()  # of the draft service
    policy.mode = SpeculationMode.SELF_SPECULATE
    state_rows = tokens = 0
    while not engine.idle:
        output = engine.step()
        tokens += sum(len(commit.tokens) for commit in output.commits)
        state_rows += sum(len(block.rows) for block in output.features)
        if tokens > 30:  # proposals are wanted now
            policy.want_drafts()
    assert tokens == 40
    assert state_rows >= 26 + 40 - 2, "one for each token but the last"
    assert not loops


def test_logits_that_are_not_finite_end_the_session(pair):
    target, folder, _ = pair
    engine = drafting(with_head(target, folder), coalesce_seconds=LONG)
    engine.open(opening(1, [5, 6, 7], max_tokens=40))
    engine.step()
    engine.cache.keys[0].fill_(float("nan"))
    failures = engine.step().failures
    assert [failure.session_id for failure in failures] == [1]
    assert "not finite" in str(failures[0].error)
    engine.check()
