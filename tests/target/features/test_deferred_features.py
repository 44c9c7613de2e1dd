"""Features while no proposals are wanted, and of sessions that close or reopen meanwhile."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save

from outrider.serving.features import FeatureSpec
from outrider.speculation.proposal import FinishReason
from services.target.features import features
from services.target.features.fusion import Fusion
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.modes.policy import ModePolicy
from tests.support.target.driving import engine_of, opening
from tests.support.target.features import F32, WIDTH, Reader, configured, prompts, proposals_of


class RandomlyPaused(ModePolicy):
    """Pauses drafting at random, step by step."""

    def __init__(self, rng, share):
        super().__init__()
        self._rng, self._share, self.chosen = rng, share, SpeculationMode.NONE

    @property
    def mode(self):
        return self.chosen

    @property
    def drafting_paused(self):
        return self.chosen is SpeculationMode.NONE

    def end(self, *args, **kwargs):
        super().end(*args, **kwargs)
        self.chosen = SpeculationMode.NONE if self._rng.random() < self._share else SpeculationMode.DRAFT_IF_READY


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("cached", "room"), [(True, 160), (True, 4096), (False, 160)])
def test_deferred_rows_are_the_same(model, truth, share, cached, room, monkeypatch):
    monkeypatch.setattr(features, "_MAX_DEFERRED_ROWS", 40)
    rng = np.random.default_rng(5)
    flags = {"page_size": 4, "max_total_tokens": room, "disable_radix_cache": not cached, "chunked_prefill_size": 7}
    engine = engine_of(model, **flags)
    engine.speculation.policy = RandomlyPaused(rng, share)
    fc = torch.randn(20, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    fusion = save({"fc.weight": fc})
    wanted = configured(engine, FeatureSpec((2, 4), format=F32), fusion)
    texts = prompts(6, longest=30)
    right = Reader(engine_of(model))
    for i, text in enumerate(texts, start=1):
        right.open(opening(i, text, max_tokens=40))
    right.run()

    reader, proposals = Reader(engine), proposals_of(right.tokens)
    for i, text in enumerate(texts, start=1):
        reader.open(replace(opening(i, text, max_tokens=40), feature_spec=wanted))
    silent = 0
    while not engine.idle:
        output = reader.step(proposals)
        silent += bool(output.commits) and not output.features
    assert reader.tokens == right.tokens
    assert (engine.scheduler.preemptions > 0) == (room == 160)
    assert silent > 10 * share, "rows are put off"
    for i, tokens in reader.tokens.items():
        rows = reader.states(i)
        assert reader.first[i] == 0
        assert share > 0.9 or len(rows) > len(tokens) - 20
        states = truth(tokens)
        expected = np.concatenate([states[2], states[4]], -1)[: len(rows)] @ fc.numpy().T
        np.testing.assert_allclose(rows, expected, rtol=5e-3, atol=5e-2)
    assert engine.features.deferred.rows == 0
    if not cached:
        return
    kept, pages = set(engine.features.store.pages), set(engine.scheduler.prefix.pages)
    assert kept <= pages
    assert kept == pages or room == 160, "without preemption none is missing"
    assert not engine.features.store.pending
    for i, tokens in reader.tokens.items():  # what was kept is right
        again = Reader(engine)
        again.open(replace(opening(100 + i, tokens[:-1], max_tokens=1), feature_spec=wanted))
        blocks = again.run().rows[100 + i]
        if blocks:
            first, rows = again.first[100 + i], np.concatenate(blocks)
            states = truth(tokens)
            expected = np.concatenate([states[2], states[4]], -1)[first : first + len(rows)] @ fc.numpy().T
            np.testing.assert_allclose(rows, expected, rtol=5e-3, atol=5e-2)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_drafters_hear_once_that_a_long_prompt_need_not_be_read(model, share):
    engine = engine_of(model, chunked_prefill_size=8)
    wanted = configured(engine, FeatureSpec((4,), format=F32))
    prompt = 4 * list(range(30, 75))
    for i in (1, 2, 3):
        engine.speculation.policy = RandomlyPaused(np.random.default_rng(0), share)
        if not share:
            engine.speculation.policy.chosen = SpeculationMode.DRAFT_IF_READY
        engine.open(replace(opening(i, prompt, max_tokens=4), feature_spec=wanted if i < 3 else 0))
        commits = []
        while not engine.idle:
            commits += engine.step().commits
        empty = [commit for commit in commits if not len(commit.tokens)]
        assert commits[: len(empty)] == empty
        assert len(empty) == (share == 1.0 and i == 1), "the second prompt is known, and no drafter reads the third one"
        for commit in empty:
            assert (commit.base_length, commit.draft_budget, commit.finish_reason) == (
                len(prompt),
                0,
                FinishReason.RUNNING,
            )
        assert sum(len(commit.tokens) for commit in commits) == 4


@pytest.mark.parametrize("left", [3, 30])
def test_few_last_tokens_are_not_worth_a_head_s_reading(model, left):
    """Drafting that was paused does not resume for the last tokens; drafting under way continues."""
    engine = engine_of(model)
    wanted = configured(engine, FeatureSpec((4,), format=F32))
    for rested in (True, False):
        engine.speculation.policy = RandomlyPaused(np.random.default_rng(0), 0.0)
        engine.speculation.policy.chosen = SpeculationMode.NONE if rested else SpeculationMode.DRAFT_IF_READY
        engine.open(replace(opening(1, 4 * list(range(30, 75)), max_tokens=1 + left), feature_spec=wanted))
        commits = []
        while not engine.idle:
            commits += engine.step().commits
        reported = [commit.draft_budget > 0 for commit in commits[:-1]]
        asked = any(reported[1:]) if rested else all(reported)
        assert asked == (left == 30 or not rested)
        assert reported[0] != rested


def test_rows_of_a_session_that_is_closed_are_kept_for_its_pages(model, truth):
    engine = engine_of(model, page_size=4)
    engine.speculation.policy = RandomlyPaused(np.random.default_rng(0), 1.0)
    wanted = configured(engine, FeatureSpec((4,), format=F32), save({"fc.weight": torch.eye(WIDTH)}))
    text = list(range(30, 75))
    engine.open(replace(opening(1, text), feature_spec=wanted))
    for _ in range(5):
        assert not engine.step().features
    engine.close(1)
    assert set(engine.features.store.pages) == set(engine.scheduler.prefix.pages) != set()
    engine.speculation.policy = RandomlyPaused(np.random.default_rng(0), 0.0)
    reader = Reader(engine)
    reader.open(replace(opening(2, text), feature_spec=wanted))
    rows = reader.run().states(2)
    assert (reader.first[2], len(rows)) == (0, len(reader.tokens[2]) - 2)
    np.testing.assert_allclose(rows, truth(reader.tokens[2])[4][: len(rows)], rtol=2e-3, atol=2e-3)


def test_rows_of_a_former_run_are_not_those_of_a_session_that_is_opened_again(model, truth):
    """Its draft has come back meanwhile, and feeds on the states of all tokens, not of those that wait to be fused."""
    engine = engine_of(model)
    engine.speculation.policy = RandomlyPaused(np.random.default_rng(0), share=1.0)  # drafting is paused
    fc = torch.randn(20, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    wanted = configured(engine, FeatureSpec((2, 4), format=F32), save({"fc.weight": fc}))
    prompt, other = prompts(2, longest=30)
    reader = Reader(engine)
    reader.open(replace(opening(1, other, max_tokens=40), feature_spec=wanted))
    reader.open(opening(2, prompt, max_tokens=40))
    for _ in range(3):
        reader.step()
    engine.features.forget()  # as of a flush: what waited until here is fused
    for _ in range(3):
        reader.step()
    committed = reader.tokens[2][len(prompt) :]
    assert committed
    reader.open(replace(opening(2, prompt, committed=committed, max_tokens=40), feature_spec=wanted))
    engine.speculation.policy = RandomlyPaused(np.random.default_rng(0), share=0.0)
    reader.run()
    for session_id in (1, 2):
        tokens, rows = reader.tokens[session_id], reader.states(session_id)
        states = truth(tokens)
        expected = np.concatenate([states[2], states[4]], -1)[: len(rows)] @ fc.numpy().T
        assert (reader.first[session_id], len(rows)) == (0, len(tokens) - 2)
        np.testing.assert_allclose(rows, expected, rtol=5e-3, atol=5e-2)


def test_states_that_are_sent_as_they_are_leave_before_their_session_ends(model, truth):
    engine = engine_of(model)
    engine.speculation.policy = RandomlyPaused(np.random.default_rng(0), 1.0)
    wanted = configured(engine, FeatureSpec((4,), format=F32))
    reader = Reader(engine)
    reader.open(replace(opening(1, list(range(30, 75)), max_tokens=8), feature_spec=wanted))
    while not engine.idle:
        reader.step()
        if not engine.idle:
            assert sum(map(len, reader.rows[1])) == len(reader.tokens[1]) - 1
    rows = reader.states(1)
    np.testing.assert_allclose(rows, truth(reader.tokens[1])[4][: len(rows)], rtol=2e-3, atol=2e-3)


def test_steps_capture_for_all_sessions_together(model):
    """Not of each: there may be many."""
    engine = engine_of(model)
    engine.speculation.policy = RandomlyPaused(np.random.default_rng(0), 1.0)
    wanted = configured(engine, FeatureSpec((4,), format=F32), save({"fc.weight": torch.eye(WIDTH)}))
    asked = []

    class Watched(Fusion):
        @property
        def fuses(self):
            asked.append(1)
            return True

    fusion = engine.features.registry.fusions[wanted]
    del fusion.fuses
    fusion.__class__ = Watched
    for session_id in range(6):
        engine.open(replace(opening(session_id, [5, 6, session_id + 7], max_tokens=8), feature_spec=wanted))
    steps = 0
    while not engine.idle:
        steps += len(engine.step().commits) > 0
    assert steps >= 8
    assert 0 < len(asked) <= steps
    assert not engine.features.registry.users
