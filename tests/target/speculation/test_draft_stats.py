"""Draft stats: each received draft token and each step without draft tokens is counted once."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.speculation.proposal import Proposal, path_hash
from services.target.speculation.budget import Budget
from services.target.speculation.estimates.step_cost import StepCost
from tests.support.target.driving import chain, engine_of, load_model, opening, random_tree, run
from tests.support.tiny import VOCAB, write_model

CAUSES = ("steps_without_drafter", "steps_paused", "steps_late", "steps_empty", "steps_not_selected")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("llama")))


def empty_proposal(session_id, path, behind=0):
    """A proposal without draft tokens. behind: draft lag in tokens."""
    return replace(chain(session_id, path, []), committed_length=len(path) - behind)


def causes(engine):
    load = engine.load().draft_stats
    return {cause: getattr(load, cause) for cause in CAUSES if getattr(load, cause)}


def test_no_stats_without_a_drafter(model):
    engine = engine_of(model)
    run(engine, [opening(1, [5, 6, 7])])
    assert engine.load().draft_stats is None


@pytest.mark.parametrize("seed", range(3))
def test_each_draft_token_is_verified_or_unverified(model, seed):
    rng = np.random.default_rng(seed)
    engine = engine_of(model)
    requests = [opening(i, rng.integers(3, VOCAB, 9).tolist(), max_tokens=20) for i in range(1, 5)]

    def proposals(session_id, path):
        stale = path[: max(1, len(path) - int(rng.integers(0, 4)))]
        return [random_tree(rng, session_id, stale, 6, 5), random_tree(rng, session_id + 90, path, 6, 5)]

    result = run(engine, requests, proposals)
    load = engine.load().draft_stats
    assert load.received_tokens > load.unverified_tokens > 0
    assert load.received_tokens - load.unverified_tokens == result.verified > 0


def test_draft_tokens_of_a_closed_session_are_unverified(model):
    engine = engine_of(model)
    engine.open(opening(1, [5, 6, 7]))
    engine.receive([chain(1, [5, 6, 7], [8, 9])], ())
    engine.close(1)
    assert (engine.load().draft_stats.received_tokens, engine.load().draft_stats.unverified_tokens) == (2, 2)


def test_causes_of_steps_without_draft_tokens(model):
    engine = engine_of(model)
    plain = replace(opening(1, [5, 6, 7], max_tokens=9), max_draft_tokens=0)
    requests = [
        plain,
        opening(2, [6, 7, 8], max_tokens=10),
        opening(3, [7, 8], max_tokens=11),
        opening(4, [9], max_tokens=12),
    ]

    def proposals(session_id, path):
        answers = {2: [empty_proposal(2, path)], 3: [empty_proposal(3, path, behind=1)]}
        return answers.get(session_id, [])

    run(engine, requests, proposals)
    # The first step of each session is not counted: it has no draft tokens in any case.
    assert causes(engine) == {"steps_paused": 8, "steps_empty": 9, "steps_late": 10, "steps_without_drafter": 11}


def test_steps_whose_draft_tokens_are_not_worth_their_cost(model):
    engine = engine_of(model)
    engine.speculation.planner.budget = Budget(StepCost({1: 0.001, 2: 10.0, 60: 600.0}))

    def proposals(session_id, path):
        return [replace(chain(session_id, path, [3, 4], score=-9.0), committed_length=len(path))]

    result = run(engine, [opening(1, [5, 6, 7], max_tokens=6)], proposals)
    assert result.verified <= 1  # one is verified now and then, for calibration
    assert causes(engine) == {"steps_not_selected": 5 - result.verified}


def test_the_histogram_of_draft_lag(model):
    engine = engine_of(model)
    engine.open(opening(1, list(range(3, 60))))
    path = list(range(3, 60))
    for behind in (0, 0, 1, 3, 40):
        engine.receive([empty_proposal(1, path, behind)], ())
    load = engine.load().draft_stats
    assert load.lag_histogram == (2, 1, 0, 1, 0, 0, 0, 1)
    assert load.lag_tokens == 44


def test_warm_up_leaves_no_stats(model):
    engine = engine_of(model)
    engine.open(opening(1, [5, 6]))
    engine.receive(
        [Proposal(1, 2, path_hash(np.array([5, 6])), *(np.empty(0, t) for t in (np.uint32, np.int32, np.float32)))], ()
    )
    assert engine.load().draft_stats is not None
    engine.close(1)
    engine.forget_measurements()
    assert engine.load().draft_stats is None
