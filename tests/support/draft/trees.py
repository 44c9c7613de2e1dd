"""Comparison of draft trees."""

from __future__ import annotations

import numpy as np


def tree_of(engine, session_id):
    """The tree of a session, as path scores by path."""
    tree = engine.running[session_id].tree
    return {tuple(tree.path_tokens(i)): tree.path_score[i] for i in range(len(tree))}


def check_same_tree(found, expected):
    """Check that two trees have the same nodes, with nearly the same scores."""
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), [expected[path] for path in found], atol=1e-3)
