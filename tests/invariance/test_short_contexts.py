"""Drafters with a shorter context than the target: they draft up to its end, and the text continues without."""

import pytest

from tests.support.checkpoints.perfect import write_cyclic_target, write_perfect_eagle3
from tests.support.invariance.engines import draft_engine, target_engine
from tests.support.invariance.pair import Pair, request
from tests.support.tiny import write_model

CONTEXT = 64
LENGTH = 120
SHORT, LONG = [45], [40 + i % 20 for i in range(CONTEXT + 6)]  # LONG exceeds the context of the drafters


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
def test_text_continues_beyond_the_context_of_the_drafter(target, draft, temperature):
    todo = [request(i, prompt, temperature, LENGTH) for i, prompt in enumerate((SHORT, LONG))]
    plain = Pair(target_engine(target)).run(todo)
    assert draft.drafter.max_session_tokens == CONTEXT
    run = Pair(target_engine(target), lambda: draft, draft_steps=8).run(todo)
    assert run.tokens == plain.tokens
    assert run.reopened == 0
    if draft.drafter.features is not None:  # a perfect head is accepted within its context
        assert 0.5 * CONTEXT < run.accepted < CONTEXT
    assert draft.drafter.prefix_kvs == {}
    draft.check()
