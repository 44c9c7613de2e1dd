"""The drafter's own prefix cache: what it has fed once is not fed again, and its proposals are the same."""

import numpy as np
import pytest

from tests.support.draft.helpers import OracleTarget, request, settle, standalone, torch_logits
from tests.support.tiny import VOCAB, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("draft"))


def fed(engine, session_id):
    """Let an engine settle; which tokens of a session it had to feed, from the first to the last."""
    trunk = engine.drafter.trunks[session_id]
    start = trunk.computed
    settle(engine)
    return start, trunk.computed


def tree_of(engine, session_id):
    tree = engine.running[session_id].tree
    return {tuple(tree.path_tokens(i)): tree.path_score[i] for i in range(len(tree))}


def same(found, expected):
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), [expected[path] for path in found], atol=1e-3)


@pytest.mark.parametrize("page_size", [2, 16])
def test_a_conversation_goes_on_from_what_was_fed(model, page_size):
    """Between turns the session closes right after a commit, while accepted rows still wait to be moved."""
    flags = {"draft_page_size": page_size, "draft_max_total_tokens": 1024, "max_running_requests": 2}
    engine, plain = standalone(model, **flags), standalone(model, disable_radix_cache=True, **flags)
    next_logits = torch_logits(model)
    rng = np.random.default_rng(1)
    tokens = rng.integers(4, VOCAB, 40).tolist()
    known = moved = 0
    for turn in range(3):
        opened = request(turn, tokens)
        for one in (engine, plain):
            one.open(opened)
        start, stop = fed(engine, turn)
        assert (start, stop) == (min(known, len(tokens) - 1) // page_size * page_size, len(tokens))
        assert fed(plain, turn) == (0, len(tokens))
        same(tree_of(engine, turn), tree_of(plain, turn))
        target = OracleTarget(next_logits, opened)
        session = engine.running[turn]
        for _ in range(4):
            for proposal in settle(engine):
                target.hear(proposal)
            target.tree.clear()
            for path in tree_of(engine, turn):  # all that it has drafted, so that much is accepted
                node = -1
                for token in path:
                    node = target.tree.add(node, token, -0.1)
            engine.receive([], [target.step()])
        known = engine.drafter.trunks[turn].computed - len(engine.drafter.moves.get(turn, ()))
        moved += len(engine.drafter.moves.get(turn, ()))
        assert session.length == len(target.tokens)
        for one in (engine, plain):
            one.close(turn)
            one.check()
        tokens = [*target.tokens, *rng.integers(4, VOCAB, 3).tolist()]
    assert moved > 0
    assert plain.load().cached_pages == 0 < engine.load().cached_pages


def test_choices_of_a_prompt_are_fed_once(model):
    engine = standalone(model, draft_max_total_tokens=1024)
    prompt = np.random.default_rng(3).integers(4, VOCAB, 100).tolist()
    for i in range(3):
        engine.open(request(i, prompt))
    steps = settle(engine)
    assert sum(output.load.step_tokens for output in steps if output.load.step_tokens > 20) == 100
    first = tree_of(engine, 0)
    for i in (1, 2):
        same(tree_of(engine, i), first)
    assert engine.drafter.prefix.allocator.leased_pages == 6 + 3 * (1 + 64 // 16)
    engine.check()
