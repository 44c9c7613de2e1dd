"""Drafters with a shorter context than the target's: they help as far as it goes, and beyond it the text goes on."""

import pytest

from tests.support.checkpoints.perfect import write_cyclic_target, write_perfect_eagle3
from tests.support.invariance.engines import draft_engine, target_engine
from tests.support.invariance.pair import Pair, request
from tests.support.tiny import write_model

CONTEXT = 64
LENGTH = 120
SHORT, LONG = [45], [40 + i % 20 for i in range(CONTEXT + 6)]  # the second is longer than any drafter can follow


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_cyclic_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=["STANDALONE", "EAGLE3"])
def draft(request, target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft") / "model"
    if request.param == "STANDALONE":
        write_model(folder, max_position_embeddings=CONTEXT)
        return draft_engine("STANDALONE", folder, max_running=1)
    write_perfect_eagle3(folder, target, max_position_embeddings=CONTEXT)
    return draft_engine("EAGLE3", folder, target, max_running=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_goes_on_where_a_draft_ends(target, draft, temperature):
    todo = [request(i, prompt, temperature, LENGTH) for i, prompt in enumerate((SHORT, LONG))]
    plain = Pair(target_engine(target)).run(todo)
    assert draft.drafter.max_session_tokens == CONTEXT
    run = Pair(target_engine(target), lambda: draft, growth=8).run(todo)
    assert run.tokens == plain.tokens
    assert run.reopened == 0
    if draft.drafter.features is not None:  # a head that knows the text is believed, but not beyond its context
        assert 0.5 * CONTEXT < run.accepted < CONTEXT
    assert draft.drafter.prefix_kvs == {}
    draft.check()
