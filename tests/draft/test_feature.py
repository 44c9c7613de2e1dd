"""The drafter that the target feeds, in its engine: what it says is what the formulas say, from what it was fed."""

import numpy as np
import pytest

from outrider.serving.features import FeatureBlock
from outrider.speculation.tree import ROOT
from tests.checkpoints.heads import eagle, eagle3, write_head
from tests.draft.helpers import fed, request, settle
from tests.draft.test_engine import commit_of
from tests.draft.twin import Twin
from tests.tiny import VOCAB, write_model

RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((200, 48)).astype(np.float32)
PROMPT = RNG.integers(4, VOCAB, 21).tolist()


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3"])
def head(request, tmp_path_factory):
    """Makes engines, and the twin of their head."""
    base = tmp_path_factory.mktemp("heads")
    target = write_model(base / "target", tie_word_embeddings=False)
    made = {"EAGLE": eagle, "EAGLE3": eagle3}[request.param](target)
    folder = write_head(base / "head", *made)
    return lambda **flags: fed(request.param, folder, target, **flags), Twin.of(request.param, *made, target)


def feed(engine, first, stop, session_id=1):
    engine.receive_features([FeatureBlock(session_id, first, FEATURES[first:stop].view(np.uint8))])


def check_tree(engine, twin, true, session_id=1):
    """Every node's score is what the twin says after its path, of which `true` rows have the target's features."""
    session = engine.running[session_id]
    tree = session.tree
    for parent in {ROOT, *(node for node in range(len(tree)) if tree.children[node])}:
        said = twin.log_probs(session.tokens.tolist() + tree.path_tokens(parent), FEATURES[:true])
        found = {tree.token[node]: tree.log_score[node] for node in tree.children_of(parent)}
        best = sorted(said, key=said.get, reverse=True)[: len(found)]
        assert set(found) == set(best)
        np.testing.assert_allclose(list(found.values()), [said[token] for token in found], atol=2e-3)
    return tree


def test_trees_grow_from_true_features_and_from_their_own(head):
    make, twin = head
    engine = make()
    engine.open(request(1, PROMPT, max_tokens=100))
    assert engine.idle  # nothing can be said before the first features
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
    assert (engine.drafter.trunks[1].settled, engine.drafter.trunks[1].computed) == (20, 22)

    # The features come: the rows are corrected, and the tree with them.
    feed(engine, 20, 22)
    settle(engine)
    assert engine.drafter.trunks[1].settled == 22
    check_tree(engine, twin, 22)

    # Both at once, and a token that nobody foresaw.
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
    assert not session.answered
    feed(engine, 23, len(tokens) - 1)
    settle(engine)
    assert session.answered
    check_tree(engine, twin, len(tokens) - 1)
    engine.close(1)
    engine.check()
