"""Drafters that read prompts behind the target's first token alone, because they compute on its cores."""

import numpy as np
import pytest

from outrider.speculation.proposal import Proposal
from services.target.speculation.modes.mode import SpeculationMode
from tests.support.target.driving import engine_of, load_model, opening
from tests.support.tiny import VOCAB, write_model

PROMPT = np.random.default_rng(1).integers(4, VOCAB, 130).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("target")))


def first_budget(engine, session_id, max_tokens, answered=False):
    """The draft budget behind the first token of a session. answered: a proposal came before."""
    engine.open(opening(session_id, PROMPT, max_tokens=max_tokens))
    if answered:
        tree, none = engine.sessions.by_id[session_id].tree, np.empty(0, np.int32)
        empty = none.astype(np.uint32), none, none.astype(np.float32)
        engine.receive([Proposal(session_id, tree.length, tree.root_hash, *empty, tree.length)], [])
    while not (commits := engine.step().commits):
        pass
    engine.close(session_id)
    return commits[0].draft_budget


def test_a_few_last_tokens_are_not_worth_the_reading_while_the_target_waits(model):
    engine = engine_of(model)
    assert first_budget(engine, 1, max_tokens=60) > 0
    assert first_budget(engine, 2, max_tokens=8) == 0
    assert first_budget(engine, 3, max_tokens=8, answered=True) > 0, "it reads prompts while the target does"
    assert first_budget(engine, 4, max_tokens=8) > 0


def test_only_late_readers_are_waited_for_until_their_first_answer(model):
    engine = engine_of(model)
    wait = engine.speculation.policy.wait
    wait.received(99, fresh=True)
    wait.closed(99)
    first_budget(engine, 1, max_tokens=60)
    assert wait.reads
    first_budget(engine, 2, max_tokens=60, answered=True)
    first_budget(engine, 3, max_tokens=60)
    assert wait.reads_ahead
    assert not wait.reads


def test_steps_go_on_without_waiting_only_for_drafters_that_read_ahead(model):
    engine = engine_of(model)
    policy = engine.speculation.policy
    policy.received(99, fresh=True)
    policy.begin(1)
    may_begin = policy.selector._may_begin
    assert not may_begin(SpeculationMode.DRAFT_IF_READY)
    assert may_begin(SpeculationMode.WAIT_FOR_DRAFT)
    first_budget(engine, 1, max_tokens=60, answered=True)
    assert may_begin(SpeculationMode.DRAFT_IF_READY)
