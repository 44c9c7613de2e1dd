"""The draft tree against a twin that stores whole paths in a set: merging, commits, selection."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.proposal import (
    Commit,
    FinishReason,
    Proposal,
    extend_hash,
    merge_commits,
    path_hash,
    path_hashes,
)
from outrider.speculation.tree import ROOT, SpeculationTree

TOKEN = st.integers(0, 3)  # a small alphabet, so that paths meet
PATHS = st.lists(st.lists(TOKEN, min_size=1, max_size=5).map(tuple), max_size=12)


def proposal(anchor: list[int], paths, session_id=1):
    """A proposal with these paths below an anchor path. A node's score depends only on its path."""
    rows, tokens, parents, scores = {(): -1}, [], [], []
    for path in sorted({p[:i] for p in paths for i in range(1, len(p) + 1)}, key=len):
        rows[path] = len(tokens)
        tokens.append(path[-1])
        parents.append(rows[path[:-1]])
        scores.append(-0.1 * (1 + path[-1]))
    arrays = np.array(tokens, np.uint32), np.array(parents, np.int32), np.array(scores, np.float32)
    return Proposal(session_id, len(anchor), path_hash(np.array(anchor, int)), *arrays)


def paths_of(tree: SpeculationTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(len(tree))}


def closure(paths) -> set[tuple[int, ...]]:
    return {tuple(p[:i]) for p in paths for i in range(1, len(p) + 1)}


@given(st.lists(TOKEN, min_size=1, max_size=20))
def test_hashes_of_prefixes_agree(tokens):
    hashes = path_hashes(np.array(tokens))
    assert [int(h) for h in hashes] == [path_hash(np.array(tokens[:i], int)) for i in range(len(tokens) + 1)]
    assert extend_hash(int(hashes[-2]), tokens[-1]) == int(hashes[-1])


def test_hashes_are_those_of_the_protocol():
    words = re.findall("0x[0-9A-F]{16}", (Path(__file__).parents[3] / "docs" / "protocol.md").read_text())
    golden = [0x6A09E667F3BCC909, 0x407135D67C4036EC, 0x7E4C76E344FCEE46, 0x7E1779260130E37A]
    assert path_hashes(np.array([0, 5, 151935])).tolist() == golden
    assert set(golden) <= {int(word, 16) for word in words}, "others go by that page"


def test_hashes_of_all_short_paths_differ():
    paths = [p for n in range(1, 6) for p in itertools.product(range(5), repeat=n)]
    assert len({path_hash(np.array(p)) for p in paths}) == len(paths)


@given(st.lists(PATHS, max_size=4), st.randoms())
def test_merging_is_idempotent_and_free_of_order(batches, random):
    committed = [1, 2, 3]
    proposals = [proposal(committed, paths) for paths in batches]
    expected = set().union(*(closure(paths) for paths in batches)) if batches else set()
    shuffled = proposals * 2
    random.shuffle(shuffled)
    tree = SpeculationTree(np.array(committed))
    for p in shuffled:
        tree.merge(p)
    assert paths_of(tree) == expected
    scores = {tuple(tree.path_tokens(i)): round(tree.path_score[i], 5) for i in range(len(tree))}
    assert scores == {path: round(-sum(0.1 * (1 + t) for t in path), 5) for path in expected}


@given(PATHS, st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=3), PATHS)
def test_commits_move_the_root_and_late_proposals_still_fit(paths, commits, late):
    committed = [1, 2, 3]
    tree = SpeculationTree(np.array(committed))
    tree.merge(proposal(committed, paths))
    for tokens in commits:
        before = paths_of(tree)
        kept = tree.commit(np.array(tokens))
        assert paths_of(tree) == {p[len(tokens) :] for p in before if list(p[: len(tokens)]) == tokens} - {()}
        assert kept == sorted(kept)
        assert len(kept) == len(tree)
    gone = list(itertools.chain.from_iterable(commits))
    assert tree.length == 3 + len(gone)
    assert tree.root_hash == path_hash(np.array(committed + gone))
    # A proposal anchored before the commits: what lies beside the committed path is dropped, the rest is merged.
    before = paths_of(tree)
    tree.merge(proposal(committed, late))
    fits = {p[len(gone) :] for p in closure(late) if list(p[: len(gone)]) == gone} - {()}
    assert paths_of(tree) == before | fits
    assert tree.depth == [len(tree.path_tokens(node)) for node in range(len(tree))]
    assert all(parent < node for node, parent in enumerate(tree.parent))


def test_nodes_can_be_anchors_and_unknown_anchors_are_dropped():
    tree = SpeculationTree(np.array([1]))
    assert tree.merge(proposal([1, 2], [(3,)])) == 0
    assert tree.merge(proposal([1], [(2,)])) == 1
    assert tree.merge(proposal([1, 2], [(3,)])) == 1
    assert tree.merge(proposal([2], [(3,)])) == 0  # another sequence of the same length
    assert paths_of(tree) == {(2,), (2, 3)}


def test_commit_returns_the_old_indices():
    tree = SpeculationTree(np.array([0]))
    a, b = tree.add(ROOT, 1, -0.1), tree.add(ROOT, 2, -0.2)
    aa, ba, bb = tree.add(a, 1, -0.1), tree.add(b, 1, -0.3), tree.add(b, 2, -0.1)
    aab = tree.add(aa, 2, -0.1)
    assert tree.commit(np.array([1])) == [aa, aab]
    assert tree.commit(np.array([1, 2, 3])) == []
    assert (ba, bb, len(tree)) == (3, 4, 0)


def test_a_full_tree_refuses_nodes_and_stays_whole():
    tree = SpeculationTree(np.array([0]), capacity=3)
    tree.merge(proposal([0], [(1, 2, 3, 1), (2,)]))
    assert len(tree) == 3
    assert all(p[:i] in paths_of(tree) for p in paths_of(tree) for i in range(1, len(p)))


@given(PATHS, st.integers(0, 10), st.integers(1, 4), st.integers(1, 3))
def test_selection_takes_the_best_nodes_within_its_limits(paths, max_nodes, max_depth, max_children):
    tree = SpeculationTree(np.array([1]))
    tree.merge(proposal([1], paths))
    chosen = tree.select(max_nodes, max_depth, max_children)
    rows = []
    for token, parent, depth in zip(chosen.tokens, chosen.parents, chosen.depths, strict=True):
        rows.append([*(rows[parent] if parent >= 0 else []), int(token)])
        assert len(rows[-1]) == depth <= max_depth
    found = [tuple(row) for row in rows]
    assert len(set(found)) == len(found) <= max_nodes
    assert set(found) <= paths_of(tree)
    assert all(found.count(p) == 1 and sum(q[:-1] == p[:-1] for q in found) <= max_children for p in found)
    if max_children == 3 and max_depth == 4 and len({p[:1] for p in found}) < 4:
        scores = sorted((-sum(0.1 * (1 + t) for t in p) for p in paths_of(tree) if len(p) <= 4), reverse=True)
        unlimited = tree.select(max_nodes, max_depth)
        total = sum(sum(-0.1 * (1 + t) for t in tuple(r)) for r in _rows(unlimited))
        assert abs(total - sum(scores[: len(unlimited)])) < 1e-6


def _rows(chosen):
    rows = []
    for token, parent in zip(chosen.tokens, chosen.parents, strict=True):
        rows.append([*(rows[parent] if parent >= 0 else []), int(token)])
    return rows


def test_nan_scores_become_the_minimum():
    nan, infinite = np.nan, np.inf
    tree = SpeculationTree(np.array([1, 2]))
    for scores in ([nan, -0.5, 0.5, -infinite, -1.0], [-infinite, -0.5, infinite, nan, -1.0]):
        tokens, parents = np.arange(5, dtype=np.uint32), np.array([-1, 0, -1, -1, 3], np.int32)
        anchor = path_hash(np.array([1, 2]))
        tree.merge(Proposal(1, 2, anchor, tokens, parents, np.array(scores, np.float32)))
        assert np.isfinite(tree.path_score).all()
        assert max(tree.path_score) <= 0
    chosen = tree.select(5)
    assert chosen.tokens.tolist() == [2, 0, 3, 1, 4]
    assert np.isfinite(chosen.path_scores).all()


def test_leaves_at_once_are_children_one_by_one():
    at_once, one_by_one = (SpeculationTree(np.arange(5), capacity=6) for _ in range(2))
    for parent, tokens, scores in (
        (ROOT, [3, 1], [-0.5, 0.1]),
        (1, [3, 9, 4], [-1.0, -2.0, -3.0]),
        (0, [7, 8], [0, -1]),
    ):
        leaves = at_once.add_leaves(parent, tokens, scores)
        added = [one_by_one.add(parent, token, min(score, 0.0)) for token, score in zip(tokens, scores, strict=True)]
        assert list(leaves) == [node for node in added if node is not None]
    for name in ("token", "parent", "hash", "log_score", "path_score", "depth", "children", "root_children", "_index"):
        assert getattr(at_once, name) == getattr(one_by_one, name), name
    assert len(at_once) == 6


def test_commits_are_merged_while_drafting_is_paused():
    rng = np.random.default_rng(0)
    lengths, commits = dict.fromkeys((1, 2, 3), 10), []
    for _ in range(60):
        session_id, count = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        tokens = rng.integers(0, 99, count).astype(np.uint32)
        commits.append(Commit(session_id, lengths[session_id], tokens, int(rng.integers(1 << 60)), 3, 1,
                              draft_budget=int(rng.random() < 0.3)))  # fmt: skip
        lengths[session_id] += count
    commits[-1] = replace(commits[-1], finish_reason=FinishReason.STOP)
    found = merge_commits(commits)
    assert len(found) < 0.7 * len(commits)
    for session_id in lengths:
        old = [commit for commit in commits if commit.session_id == session_id]
        new = [commit for commit in found if commit.session_id == session_id]
        assert np.array_equal(*(np.concatenate([c.tokens for c in part]) for part in (old, new)))
        assert [c.root_hash for c in new] == [c.root_hash for c in old if c.draft_budget or c is old[-1]]
        assert sum(c.verified for c in new) == sum(c.verified for c in old)
        assert sum(c.accepted for c in new) == sum(c.accepted for c in old)
        assert new[-1].finish_reason == old[-1].finish_reason
        ends = np.cumsum([len(c.tokens) for c in new])
        assert [c.base_length for c in new] == [10, *(10 + ends[:-1])]


def test_commits_that_are_not_consecutive_are_not_merged():
    first = Commit(1, 4, np.array([7], np.uint32), 1, draft_budget=0)
    for later in (replace(first), replace(first, base_length=6), replace(first, session_id=2, base_length=5)):
        assert merge_commits([first, later]) == [first, later]
