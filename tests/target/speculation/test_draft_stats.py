"""What became of hints: every node and every miss is accounted for."""

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


def word(session_id, path, behind=0):
    """A draft's answer without nodes. behind: tokens that it has not heard of."""
    return replace(chain(session_id, path, []), committed_length=len(path) - behind)


def causes(engine):
    load = engine.load().draft_stats
    return {cause: getattr(load, cause) for cause in CAUSES if getattr(load, cause)}


def test_without_a_draft_nothing_is_counted(model):
    engine = engine_of(model)
    run(engine, [opening(1, [5, 6, 7])])
    assert engine.load().draft_stats is None


@pytest.mark.parametrize("seed", range(3))
def test_every_node_is_verified_or_wasted(model, seed):
    rng = np.random.default_rng(seed)
    engine = engine_of(model)
    requests = [opening(i, rng.integers(3, VOCAB, 9).tolist(), max_tokens=20) for i in range(1, 5)]

    def hints(session_id, path):
        stale = path[: max(1, len(path) - int(rng.integers(0, 4)))]
        return [random_tree(rng, session_id, stale, 6, 5), random_tree(rng, session_id + 90, path, 6, 5)]

    result = run(engine, requests, hints)
    load = engine.load().draft_stats
    assert load.received_tokens > load.unverified_tokens > 0
    assert load.received_tokens - load.unverified_tokens == result.verified > 0


def test_a_session_that_is_closed_leaves_its_nodes_unverified(model):
    engine = engine_of(model)
    engine.open(opening(1, [5, 6, 7]))
    engine.receive([chain(1, [5, 6, 7], [8, 9])], ())
    engine.close(1)
    assert (engine.load().draft_stats.received_tokens, engine.load().draft_stats.unverified_tokens) == (2, 2)


def test_why_a_step_had_none(model):
    engine = engine_of(model)
    plain = replace(opening(1, [5, 6, 7], max_tokens=9), max_draft_tokens=0)
    requests = [
        plain,
        opening(2, [6, 7, 8], max_tokens=10),
        opening(3, [7, 8], max_tokens=11),
        opening(4, [9], max_tokens=12),
    ]

    def hints(session_id, path):
        answers = {2: [word(2, path)], 3: [word(3, path, behind=1)]}
        return answers.get(session_id, [])

    run(engine, requests, hints)
    # The first step of each session is none that a hint could have helped.
    assert causes(engine) == {"steps_paused": 8, "steps_empty": 9, "steps_late": 10, "steps_without_drafter": 11}


def test_nodes_that_are_not_worth_their_rows(model):
    engine = engine_of(model)
    engine.speculation.planner.budget = Budget(StepCost({1: 0.001, 2: 10.0, 60: 600.0}))

    def hints(session_id, path):
        return [replace(chain(session_id, path, [3, 4], score=-9.0), committed_length=len(path))]

    result = run(engine, [opening(1, [5, 6, 7], max_tokens=6)], hints)
    assert result.verified <= 1  # now and then one is tried all the same
    assert causes(engine) == {"steps_not_selected": 5 - result.verified}


def test_how_late_answers_come(model):
    engine = engine_of(model)
    engine.open(opening(1, list(range(3, 60))))
    path = list(range(3, 60))
    for behind in (0, 0, 1, 3, 40):
        engine.receive([word(1, path, behind)], ())
    load = engine.load().draft_stats
    assert load.lag_histogram == (2, 1, 0, 1, 0, 0, 0, 1)
    assert load.lag_tokens == 44


def test_warm_up_leaves_no_trace(model):
    engine = engine_of(model)
    engine.open(opening(1, [5, 6]))
    engine.receive(
        [Proposal(1, 2, path_hash(np.array([5, 6])), *(np.empty(0, t) for t in (np.uint32, np.int32, np.float32)))], ()
    )
    assert engine.load().draft_stats is not None
    engine.close(1)
    engine.forget_measurements()
    assert engine.load().draft_stats is None
