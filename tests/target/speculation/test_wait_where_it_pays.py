"""A step whose sessions have draft tokens left is held only where the drafter's answers are worth their time."""

from dataclasses import replace

import pytest

from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.modes.policy import ModePolicy
from tests.support.target.driving import chain, engine_of, load_model, opening, run
from tests.support.tiny import write_model

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(model):
    return run(engine_of(model), [opening(1, PROMPT)]).new[1]


@pytest.mark.parametrize("left", [4, 0])
@pytest.mark.parametrize("pays", [True, False])
def test_a_step_is_held_where_that_pays(model, text, monkeypatch, left, pays):
    engine = engine_of(model)
    engine.speculation.policy = policy = ModePolicy([SpeculationMode.WAIT_FOR_DRAFT], longest=60.0)
    promised = []
    monkeypatch.setattr(policy.wait.gain, "worth", lambda own, _: promised.append(own) or ({2} if pays else set()))
    engine.open(replace(opening(2, PROMPT), max_draft_tokens=2))
    (first,) = engine.step().commits
    tokens = [*PROMPT, *first.tokens.tolist()]
    engine.receive([chain(2, tokens, text[1 : 4 + left])], ())
    (commit,) = engine.step().commits
    assert (commit.accepted, len(engine.sessions.by_id[2].tree)) == (2, left)
    assert (engine.draft_wait > 0) is pays
    (own,) = promised
    if left:
        assert 1.5 < own[2] <= 2.0, "of the two draft tokens that the session may verify"
    else:
        assert own == {2: None}
    engine.close(2)


def test_explicit_trees_are_waited_for(model, text):
    """Their number of draft tokens is fixed by flags, whatever pays."""
    flags = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
    engine = engine_of(model, **flags)
    engine.speculation.policy = policy = ModePolicy([SpeculationMode.WAIT_FOR_DRAFT], longest=60.0)
    policy.wait.gain.worth = lambda *_: set()
    engine.open(opening(2, PROMPT))
    (first,) = engine.step().commits
    engine.receive([chain(2, [*PROMPT, *first.tokens.tolist()], text[1:8])], ())
    engine.step()
    assert len(engine.sessions.by_id[2].tree) > 0
    assert engine.draft_wait > 0
    engine.close(2)
