"""The drafter's own prefix cache: cached rows are not computed again, and proposals are unchanged."""

import numpy as np
import pytest

from tests.support.draft.helpers import OracleTarget, request, settle, standalone, torch_logits
from tests.support.draft.trees import check_same_tree, tree_of
from tests.support.tiny import VOCAB, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("draft"))


def computed_range(engine, session_id):
    """Let an engine settle; returns the tokens of a session that it computed, from the first to the last."""
    prefix_kv = engine.drafter.prefix_kvs[session_id]
    start = prefix_kv.computed
    settle(engine)
    return start, prefix_kv.computed


@pytest.mark.parametrize("page_size", [2, 16])
def test_conversation_reuses_its_cached_prefix(model, page_size):
    """Between turns the session closes right after a commit, while rows of accepted nodes still wait to be moved."""
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
        start, stop = computed_range(engine, turn)
        assert (start, stop) == (min(known, len(tokens) - 1) // page_size * page_size, len(tokens))
        assert computed_range(plain, turn) == (0, len(tokens))
        check_same_tree(tree_of(engine, turn), tree_of(plain, turn))
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
        known = engine.drafter.prefix_kvs[turn].computed - len(engine.drafter.executor.moves.get(turn, ()))
        moved += len(engine.drafter.executor.moves.get(turn, ()))
        assert session.length == len(target.tokens)
        for one in (engine, plain):
            one.close(turn)
            one.check()
        tokens = [*target.tokens, *rng.integers(4, VOCAB, 3).tolist()]
    assert moved > 0
    assert plain.load().cached_pages == 0 < engine.load().cached_pages


def test_choices_of_a_prompt_share_its_prefix(model):
    engine = standalone(model, draft_max_total_tokens=1024)
    prompt = np.random.default_rng(3).integers(4, VOCAB, 100).tolist()
    for i in range(3):
        engine.open(request(i, prompt))
    steps = settle(engine)
    assert sum(output.load.step_tokens for output in steps if output.load.step_tokens > 20) == 100
    first = tree_of(engine, 0)
    for i in (1, 2):
        check_same_tree(tree_of(engine, i), first)
    assert engine.drafter.prefix.allocator.leased_pages == 6 + 3 * (1 + 64 // 16)
    engine.check()
