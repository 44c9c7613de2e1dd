"""The feature drafter in its engine: its scores equal those of the formulas, for the features that it received."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureBlock
from outrider.speculation.proposal import extend_hash
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.drafters import feature
from tests.support.checkpoints.heads import write_pair
from tests.support.draft.features import FEATURES, PROMPT, RNG, feed, start
from tests.support.draft.helpers import commit_of, feature_engine, request, settle
from tests.support.draft.twins.heads import Twin
from tests.support.tiny import VOCAB


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3"])
def head(request, tmp_path_factory):
    """Makes engines, and the twin of their head."""
    target, folder, made = write_pair(tmp_path_factory.mktemp("heads"), request.param, max_position_embeddings=128)
    return lambda: feature_engine(request.param, folder, target, draft_page_size=4, max_running_requests=2), Twin.of(
        request.param, *made, target
    )


def check_tree(engine, twin, true, session_id=1):
    """Every node's score equals the twin's after its path, of which `true` rows have the target's features."""
    session = engine.running[session_id]
    tree = session.tree
    for parent in {ROOT, *(node for node in range(len(tree)) if tree.children[node])}:
        log_probs = twin.log_probs(session.tokens.tolist() + tree.path_tokens(parent), FEATURES[:true])
        found = {tree.token[node]: tree.log_score[node] for node in tree.children_of(parent)}
        best = sorted(log_probs, key=log_probs.get, reverse=True)[: len(found)]
        assert set(found) == set(best)
        np.testing.assert_allclose(list(found.values()), [log_probs[token] for token in found], atol=2e-3)
    return tree


def test_trees_grow_from_true_features_and_from_their_own(head):
    make, twin = head
    engine = make()
    engine.open(request(1, PROMPT, max_tokens=100))
    assert engine.idle  # no proposal is possible before the first features
    feed(engine, 0, 20)
    assert len(settle(engine)) > 1
    tree = check_tree(engine, twin, 20)
    assert max(tree.depth) >= 2
    tokens = list(PROMPT)

    # A commit without features: what is below it survives and grows on, on the head's own features.
    session = engine.running[1]
    node = next(i for i in range(len(tree)) if tree.depth[i] == 2 and tree.children[i])
    new = tree.path_tokens(node)
    engine.receive([], [commit_of(tokens, new)])
    tokens += new
    assert session.root_expanded
    settle(engine)
    check_tree(engine, twin, 20)
    assert (engine.drafter.prefix_kvs[1].settled, engine.drafter.prefix_kvs[1].computed) == (20, 22)

    # The features come: the rows are corrected, and the tree with them.
    feed(engine, 20, 22)
    settle(engine)
    assert engine.drafter.prefix_kvs[1].settled == 22
    check_tree(engine, twin, 22)

    # Both at once, and a token that is not in the tree.
    engine.receive([], [commit_of(tokens, [5])])
    tokens += [5]
    feed(engine, 22, 23)
    settle(engine)
    tree = check_tree(engine, twin, 23)

    # A commit that goes beyond the expanded nodes: its session waits for the features.
    leaf = next(i for i in range(len(tree)) if not tree.children[i])
    new = [*tree.path_tokens(leaf), 9]
    engine.receive([], [commit_of(tokens, new)])
    tokens += new
    assert engine.idle
    assert not session.replied
    feed(engine, 23, len(tokens) - 1)
    settle(engine)
    assert session.replied
    check_tree(engine, twin, len(tokens) - 1)
    engine.close(1)
    engine.check()


def proposed(outputs):
    return [proposal for output in outputs for proposal in output.proposals]


def test_a_corrected_tree_replaces_that_of_the_first_tier(head):
    """What survives a commit is proposed until the features arrive; then all scores are those of the true ones."""
    make, twin = head
    engine = make()
    engine.open(request(1, PROMPT, max_tokens=100))
    at_target = SpeculationTree(np.array(PROMPT))
    feed(engine, 0, 20)
    for proposal in proposed(settle(engine)):
        at_target.merge(proposal)
    session, tree = engine.running[1], engine.running[1].tree
    new = tree.path_tokens(next(i for i in range(len(tree)) if tree.depth[i] == 2 and tree.children[i]))
    engine.receive([], [commit_of(PROMPT, new)])
    at_target.commit(np.array(new))
    assert len(at_target) > 0, "the target has draft tokens at once"
    for proposal in proposed(settle(engine)):  # it answers, although the features are missing
        at_target.merge(proposal)
    first = dict(zip(tree.hash, tree.log_score, strict=True))
    feed(engine, 20, 22)
    assert not session.root_expanded
    for proposal in proposed(settle(engine)):
        at_target.merge(proposal)
    check_tree(engine, twin, 22)
    corrected = dict(zip(tree.hash, tree.log_score, strict=True))
    assert corrected != first
    known = dict(zip(at_target.hash, at_target.log_score, strict=True))
    likely = {tree.hash[i] for i in range(len(tree)) if tree.path_score[i] >= engine.limits.log_floor}
    assert likely
    assert likely <= known.keys()
    assert all(known[path] > corrected[path] - 0.11 for path in likely)  # smaller rises are not sent


def test_without_drafting_ahead_there_is_one_tree_for_each_commit(head):
    """Nothing grows while the target verifies, and nothing survives a commit whose features are missing."""
    make, twin = head
    engine = make()
    engine.drafter.wait_for_features()
    tokens, held = list(PROMPT), 0
    engine.open(request(1, PROMPT, max_tokens=100))
    for new in ([], None, [5]):  # at first, along the tree, and beside it
        session = engine.running[1]
        tree = session.tree
        if new is None:
            new = tree.path_tokens(next(i for i in range(len(tree)) if tree.depth[i] == 2 and tree.children[i]))
        if new:
            engine.receive([], [commit_of(tokens, new)])
            assert not session.root_expanded
            assert engine.idle
        tokens += new
        feed(engine, held, len(tokens) - 1)
        held = len(tokens) - 1
        outputs = settle(engine)
        assert len(outputs) <= 2, "the rows of a prompt, and a tree"
        assert max(check_tree(engine, twin, held).depth) >= 2
    engine.close(1)
    engine.check()


# --- the cache ---


def test_row_is_paired_with_the_next_token(head):
    """Common rows of two prompts are cached up to the row before the last common token, and need no features."""
    make, twin = head
    engine = make()
    common = PROMPT[:13]
    start(engine, [*common, 7, 8, 9])
    engine.close(1)
    engine.open(request(2, [*common, 50, 51, 52], max_tokens=100))
    assert engine.drafter.prefix_kvs[2].settled == 12  # rows 0 .. 11 pair tokens 1 .. 12 with what came before them
    feed(engine, 0, 9, 2)
    assert engine.idle
    feed(engine, 9, 15, 2)
    steps = settle(engine)
    assert steps[0].load.step_tokens == 3
    check_tree(engine, twin, 15, 2)
    engine.close(2)
    # Another first token, and then the same ones: nothing is shared.
    engine.open(request(3, [99, *common[1:], 50], max_tokens=100))
    assert engine.drafter.prefix_kvs[3].settled == 0
    engine.close(3)
    engine.check()


def test_provisional_rows_are_never_shared(head):
    make, _ = head
    engine = make()
    tokens = list(PROMPT)
    start(engine, tokens)
    for _ in range(3):  # without features of the target
        tree = engine.running[1].tree
        node = max((i for i in range(len(tree)) if tree.children[i]), key=lambda i: tree.depth[i])
        new = tree.path_tokens(node)
        engine.receive([], [commit_of(tokens, new)])
        tokens += new
        settle(engine)
    assert engine.drafter.prefix_kvs[1].computed == len(tokens) - 1
    engine.close(1)
    engine.open(request(2, [*tokens, 5, 6], max_tokens=100))
    assert engine.drafter.prefix_kvs[2].settled == 20  # whole pages, of rows with true features
    engine.close(2)
    engine.check()


# --- what may go wrong ---


def failures(outputs):
    return [failure for output in outputs for failure in output.failures]


def test_lost_features_fail_the_session(head):
    make, twin = head
    engine = make()
    start(engine, PROMPT)
    engine.receive([], [commit_of(PROMPT, [5, 6, 7])])
    feed(engine, 21, 23)  # where is 20?
    (failure,) = failures(settle(engine))
    assert "hidden states of its tokens are missing; open it again" in failure.error.message
    assert not engine.running
    # It is opened again, with everything from the beginning.
    tokens = [*PROMPT, 5, 6, 7]
    start(engine, tokens)
    check_tree(engine, twin, 23)


def test_features_of_a_wrong_width_fail_the_session(head):
    make, _ = head
    engine = make()
    engine.open(request(1, PROMPT, max_tokens=100))
    engine.receive_features([FeatureBlock(1, 0, np.zeros((3, 10), np.uint8))])
    (failure,) = failures(settle(engine))
    assert "10 bytes a token, not 192" in failure.error.message
    for name in (1, 2):
        engine.open(request(name, PROMPT, max_tokens=100))
    feed(engine, 0, 20, session_id=2)
    feed(engine, 0, 8)
    engine.receive_features([FeatureBlock(1, 8, np.zeros((13, 96), np.uint8))])  # behind rows that are right
    (failure,) = failures(settle(engine))
    assert failure.session_id == 1
    assert set(engine.running) == {2}


def test_preempted_session_is_computed_again(head):
    make, twin = head
    engine = make()
    engine.drafter.prefix = PrefixCache(PageAllocator(48, 4), enabled=False)
    start(engine, PROMPT, 1)
    start(engine, PROMPT, 2)
    new = list(range(4, 34))
    engine.receive([], [commit_of(PROMPT, new, session_id=1)])
    feed(engine, 20, 50, 1)
    assert set(engine.running) == {2}
    assert len(engine.sessions[1].features) == 0  # what comes now is not kept
    engine.close(2)
    (failure,) = failures(settle(engine))
    assert failure.session_id == 1
    start(engine, [*PROMPT, *new], 1)
    check_tree(engine, twin, 50)
    engine.close(1)
    engine.check()


def test_preempted_session_keeps_its_queue_order(head):
    """Later sessions do not overtake it, neither while it waits nor when it is opened again."""
    make, twin = head
    engine = make()
    engine.drafter.prefix = PrefixCache(PageAllocator(48, 4), enabled=False)
    for session_id in (1, 2, 3, 4):
        start(engine, PROMPT, session_id)
    assert set(engine.running) == {1, 2}
    new = list(range(4, 34))
    engine.receive([], [commit_of(PROMPT, new, session_id=1)])
    assert (set(engine.running), list(engine.waiting)) == ({2, 3}, [1, 4]), "its pages were enough for one"
    engine.close(2)
    assert (set(engine.running), list(engine.waiting)) == ({3}, [1, 4]), "room for 4, but not before 1"
    engine.close(3)
    (failure,) = failures(settle(engine))
    assert failure.session_id == 1
    for session_id in (5, 6):
        start(engine, PROMPT, session_id)
    assert set(engine.running) == {4, 5}, "meanwhile there are places for others"
    start(engine, [*PROMPT, *new], 1)
    assert list(engine.waiting) == [1, 6]
    engine.close(4)
    engine.close(5)
    assert not failures(settle(engine)), "it was fed while it waited"
    check_tree(engine, twin, 50)
    for session_id in (1, 6):
        engine.close(session_id)
    engine.check()


def test_a_prompt_of_one_token(head):
    make, twin = head
    engine = make()
    engine.open(request(1, [7], max_tokens=100))
    assert engine.idle
    engine.receive([], [commit_of([7], [9])])
    feed(engine, 0, 1)
    settle(engine)
    check_tree(engine, twin, 1)


def test_the_context_ends_without_an_error(head):
    make, _ = head
    engine = make()
    assert engine.drafter.max_session_tokens == 128
    start(engine, PROMPT[:6])
    tokens = PROMPT[:6]
    for first in range(6, 128, 15):
        new = list(range(10, 25))
        engine.receive([], [commit_of(tokens, new)])
        tokens += new
        feed(engine, first - 1, first + 14)
        assert not failures(settle(engine))
    assert not engine.running
    engine.receive([], [commit_of(tokens, [9])])
    (answer,) = (proposal for output in settle(engine) for proposal in output.proposals)
    assert (answer.committed_length, len(answer.tokens)) == (len(tokens) + 1, 0), "it is answered to its end"
    engine.close(1)
    engine.check()


def test_paused_drafting_limits_held_features(head, monkeypatch):
    """Nothing is computed until the held rows exceed their limit."""
    make, twin = head
    engine = make()
    start(engine, PROMPT)
    monkeypatch.setattr(feature, "_MAX_HELD_BYTES", 64 * engine.drafter.received_row_bytes)
    held = []
    tokens = list(PROMPT)
    for _ in range(4):
        new = RNG.integers(4, VOCAB, 20).tolist()
        commit = commit_of(tokens, new)
        engine.receive([], [replace(commit, draft_budget=0)])
        tokens += new
        feed(engine, len(tokens) - 21, len(tokens) - 1)
        settle(engine)
        held.append(len(engine.running[1].features))
    assert held[:3] == [20, 40, 60]
    assert held[3] <= 64
    engine.receive([], [commit_of(tokens, [9])])
    tokens.append(9)
    feed(engine, len(tokens) - 2, len(tokens) - 1)
    settle(engine)
    check_tree(engine, twin, len(tokens) - 1)


def test_regrown_tree_sends_only_new_or_better_nodes(head):
    """A regrown tree sends only nodes that the target does not know, or whose score has risen."""
    make, _ = head
    engine = make()
    start(engine, PROMPT)
    tree = engine.running[1].tree
    node = next(i for i in range(len(tree)) if tree.depth[i] == 1 and tree.children[i])
    new = tree.path_tokens(node)
    engine.receive([], [commit_of(PROMPT, new)])
    settle(engine)
    known = {tree.hash[i]: tree.log_score[i] for i in range(len(tree)) if engine.running[1].outbox.is_sent(i)}
    feed(engine, 20, 21)
    outputs = settle(engine)
    again = [entry for o in outputs for p in o.proposals for entry in hashes(p)]
    assert again
    assert all(path not in known or score > known[path] for path, score in again)


def hashes(proposal):
    found = [proposal.anchor_hash]
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        found.append(extend_hash(found[parent + 1], token))
    return list(zip(found[1:], proposal.log_scores.tolist(), strict=True))


def test_only_warmed_up_shapes_are_compiled(head):
    make, _ = head
    engine = make()
    engine.drafter.warm_up()
    compiled = engine.drafter.runner.compilations.total
    start(engine, PROMPT * 4)
    engine.receive([], [commit_of(PROMPT * 4, [5, 6])])
    feed(engine, 83, 85)
    settle(engine)
    assert engine.drafter.runner.compilations.total == compiled
