"""The trees that a prepared step (step/prepared.py) draws on, and for how many draft tokens it has room.

What survives depends on the bonus token of the step in flight. A draft token that this step does not verify may be the
bonus token, or lie below one that may be: then it is verified next. Its chance to be accepted there is its path score
below the present root; the nodes between do not change it. The nth draft token that survives below each possible bonus
token takes the nth place, so the expected gain of a place is the sum of these chances.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.tree import ROOT, SpeculationTree, TreeSlice
from services.target.step.prepared import MAX_NODES, NO_TOKEN, TreeTables


def tree_tables(
    trees: Sequence[SpeculationTree], drafts: Sequence[TreeSlice], roots: Sequence[int], lasts: Sequence[int]
) -> TreeTables:
    """The tables of some sessions' trees, without room for draft tokens.

    drafts: what the step in flight verifies of each; roots: rows of the roots among its samples; lasts: last positions
    that a draft token may have
    """
    nodes = np.empty((5, len(trees), MAX_NODES), np.int64)
    nodes[0], nodes[1], nodes[2], nodes[3] = NO_TOKEN, MAX_NODES, 0, -1
    scores = np.zeros((len(trees), MAX_NODES))
    for one, (tree, draft, root) in enumerate(zip(trees, drafts, roots, strict=True)):
        _fill(nodes[:, one], scores[one], tree, draft, root)
    nodes[4] = _ancestors(nodes[1])
    positions = [tree.length - 1 for tree in trees]
    return TreeTables(nodes, np.array([roots, positions, lasts, [0] * len(trees)], np.int64), scores)


def _ancestors(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each entry and its ancestors, as bits. parents: [S, MAX_NODES]."""
    count = len(parents)
    none = np.full((count, 1), MAX_NODES)
    bits = np.append(np.uint64(1) << np.arange(MAX_NODES, dtype=np.uint64), np.uint64(0))
    seen, above = np.tile(bits, (count, 1)), np.concatenate([parents, none], 1)
    for _ in range(MAX_NODES.bit_length() - 1):  # ancestors within 1, 2, 4, ... levels
        seen |= np.take_along_axis(seen, above, 1)
        above = np.take_along_axis(above, above, 1)
    return seen[:, :MAX_NODES].view(np.int64)


def _fill(
    nodes: NDArray[np.int64], scores: NDArray[np.float64], tree: SpeculationTree, draft: TreeSlice, root: int
) -> None:
    """One session's part, but the ancestors. nodes: [5, MAX_NODES]; scores: [MAX_NODES]."""
    count = len(draft)
    if count:
        nodes[0, :count] = draft.tokens
        nodes[1, :count] = np.where(draft.parents == ROOT, MAX_NODES, draft.parents)
        nodes[2, :count] = draft.depths
        nodes[3, :count] = np.arange(root + 1, root + 1 + count)
        scores[:count] = draft.path_scores
    if not len(tree):
        return
    place = np.full(len(tree) + 1, MAX_NODES)  # of each node, and last of the root
    verified = np.array(tree.find(draft), np.int64)
    known = verified >= 0
    place[verified[known]] = np.flatnonzero(known)
    path_scores = np.array(tree.path_score)
    order = np.argsort(-path_scores, kind="stable")  # parents first, because their scores are not lower
    others = order[place[order] == MAX_NODES][: MAX_NODES - count]
    part = slice(count, count + len(others))
    place[others] = np.arange(part.start, part.stop)
    nodes[0, part] = np.array(tree.token)[others]
    nodes[1, part] = place[np.array(tree.parent)[others]]
    nodes[2, part] = np.array(tree.depth)[others]
    scores[part] = path_scores[others]


def expected_gains(tables: TreeTables, most: int) -> list[TreeSlice]:
    """The expected gain of each place for a draft token, as the scores of slices whose tokens mean nothing.

    most: places of a session
    """
    tokens, parents, _, rows, ancestors = tables.nodes
    count, entries = len(tokens), np.arange(MAX_NODES)
    parent_rows = np.take_along_axis(np.concatenate([rows, tables.sessions[0][:, None]], 1), parents, 1)
    unverified = (rows < 0) & (tokens != NO_TOKEN)
    survives = unverified & (parent_rows < 0)
    possible = np.where(unverified & ~survives, np.int64(1) << entries, 0).sum(1, keepdims=True)
    bonus = ancestors & possible  # the possible bonus token above each node that survives
    beside = (bonus[:, :, None] == bonus[:, None, :]) & survives[:, None, :]
    places = np.where(survives, np.tril(beside, -1).sum(2), most)
    gains = np.zeros((count, most + 1))
    np.add.at(gains, (np.arange(count)[:, None], np.minimum(places, most)), np.exp(tables.scores))
    return [_slice(row[:most][row[:most] > 0.0]) for row in gains]


def _slice(gains: NDArray[np.float64]) -> TreeSlice:
    return room_for(len(gains), np.log(gains).astype(np.float32))


def room_for(count: int, scores: NDArray[np.float32] | None = None) -> TreeSlice:
    """A slice that holds room for draft tokens."""
    if scores is None:
        scores = np.zeros(count, np.float32)
    return TreeSlice(np.zeros(count, np.uint32), np.full(count, ROOT, np.int32), np.ones(count, np.int32), scores)
