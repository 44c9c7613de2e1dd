"""Proposals of one session: which nodes of its draft tree the target knows, and messages with the other ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.speculation.proposal import Proposal
from outrider.speculation.tree import ROOT, SpeculationTree

# A node is sent again if its log-score has risen by more than this.
_MIN_CHANGE = 0.1


class ProposalOutbox:
    """Makes proposals from a draft tree. Every node is sent once, and again if its score rises."""

    def __init__(self, session_id: int, tree: SpeculationTree) -> None:
        self._session_id = session_id
        self._tree = tree
        self._sent: list[float] = []  # by node: the log-score that the target knows; -inf if it was not sent
        self._sent_before: dict[int, float] = {}  # log-scores that were sent before the tree was regrown, by path hash
        self._done = 0  # nodes before this one were sent, or are too unlikely, as long as the scores stay
        self._rescored = 0  # `rescored` of the tree then

    def enter_nodes(self) -> None:
        """Take up nodes that were added to the tree. Called before a commit renumbers them."""
        known, count = len(self._sent), len(self._tree)
        if self._sent_before:
            before, hashes = self._sent_before, self._tree.hash
            self._sent += [before.get(hashes[node], -math.inf) for node in range(known, count)]
        else:
            self._sent += [-math.inf] * (count - known)

    def is_sent(self, node: int) -> bool:
        """True if the target knows a node with its present score."""
        return node < len(self._sent) and self._sent[node] > -math.inf

    def renumber(self, kept: list[int]) -> None:
        """After a commit. kept: old index of each surviving node."""
        self._sent = [self._sent[old] for old in kept]
        self._sent_before, self._done = {}, 0

    def clear(self) -> None:
        """The tree was emptied, or is proposed again as a whole."""
        self._sent, self._sent_before, self._done = [], {}, 0

    def regrow(self) -> None:
        """A better tree will replace the present one. Nodes with scores that the target knows are not sent again."""
        self.enter_nodes()
        before = {self._tree.hash[node]: sent for node, sent in enumerate(self._sent) if sent > -math.inf}
        self._sent, self._sent_before, self._done = [], before, 0

    def take(self, nodes: Sequence[int], log_floor: float, budget: int) -> list[Proposal]:
        """Proposals of the unsent nodes, up to a budget, which then count as sent. log_floor: least path score.

        nodes: all of the tree as a range, or those that may be proposed
        """
        self.enter_nodes()
        tree, sent = self._tree, self._sent
        if isinstance(nodes, range) and self._rescored == tree.rescored:
            nodes = nodes[self._done :]
        fresh = [i for i in nodes if tree.log_score[i] > sent[i] + _MIN_CHANGE and tree.path_score[i] >= log_floor]
        everything = isinstance(nodes, range) and len(fresh) <= budget
        self._done, self._rescored = len(tree) if everything else 0, tree.rescored
        if len(fresh) > budget:  # the best ones; parents are among them, because no child has a higher path score
            fresh = sorted(sorted(fresh, key=lambda i: -tree.path_score[i])[:budget])
        groups: dict[int, list[int]] = {}  # by anchor, in the tree's order: parents first
        anchor_of: dict[int, int] = {}
        for node in fresh:
            parent = tree.parent[node]
            anchor_of[node] = anchor_of.get(parent, parent)
            groups.setdefault(anchor_of[node], []).append(node)
            sent[node] = tree.log_score[node]
        return self._proposals(groups) if groups else []

    def empty(self) -> list[Proposal]:
        """A proposal without nodes: the target need not wait for others."""
        return self._proposals({ROOT: []})

    def _proposals(self, groups: dict[int, list[int]]) -> list[Proposal]:
        """groups: nodes by anchor, parents before children."""
        tree, length = self._tree, self._tree.length
        nodes = [node for group in groups.values() for node in group]
        parents: list[int] = []
        for group in groups.values():
            row = {node: i for i, node in enumerate(group)}
            parents += [row.get(tree.parent[node], -1) for node in group]
        tokens = np.array([tree.token[node] for node in nodes], np.uint32)
        above = np.array(parents, np.int32)
        scores = np.array([tree.log_score[node] for node in nodes], np.float32)
        proposals: list[Proposal] = []
        first = 0
        for anchor, group in groups.items():
            own = slice(first, first + len(group))
            first = own.stop
            position = length if anchor == ROOT else length + tree.depth[anchor]
            path = tree.hash_of(anchor)
            proposals.append(Proposal(self._session_id, position, path, tokens[own], above[own], scores[own], length))
        return proposals
