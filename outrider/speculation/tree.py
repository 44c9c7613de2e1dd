"""The draft tree of one session: all draft tokens below the committed path.

Both services keep one. The target merges proposals into its tree and verifies the best nodes; a drafter grows its own
copy. A commit moves the root down and drops the siblings; the nodes that remain are already the next proposal.

    committed path   t0 t1 ... t(n-1)          length n; t(n-1) is the root
    nodes                        └── a ── b     a node of depth d is the token at absolute position n - 1 + d
                                 └── c
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.proposal import Proposal, extend_hash, path_hashes

ROOT = -1
_DEAD = -2
_MANY = 4  # changed scores, beyond which all path scores behind them are computed again
_MIN_LOG_SCORE = -1e4  # of an edge, so that sums along a path stay precise


@dataclass(frozen=True)
class TreeSlice:
    """The nodes selected for one verification step, parents before children.

    tokens:  [N] uint32
    parents: [N] int32, index into this slice; ROOT is the root
    depths:  [N] int32, 1 for the root's children
    path_scores: [N] float32, estimated log-probabilities that the nodes are accepted
    """

    tokens: NDArray[np.uint32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    path_scores: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, count: int) -> TreeSlice:
        """The first `count` nodes, which include their parents."""
        if count >= len(self):
            return self
        return TreeSlice(self.tokens[:count], self.parents[:count], self.depths[:count], self.path_scores[:count])


_NO_NODES = np.empty(0, np.int32)
EMPTY_SLICE = TreeSlice(np.empty(0, np.uint32), _NO_NODES, _NO_NODES, np.empty(0, np.float32))


class SpeculationTree:
    """Nodes below the root, as parallel lists; index i is a node, ROOT is the last committed token.

    token, parent: ints; hash: 64-bit path hash; log_score: of the edge, at most 0; path_score: sum of log_scores from
    the root; depth: 1 for the root's children. Parents precede their children. rescored: number of times that scores of
    present nodes have changed
    """

    def __init__(self, committed: NDArray[np.integer], capacity: int = 256) -> None:
        """committed: [n] token ids, n >= 1. capacity: maximum number of nodes."""
        self.capacity = capacity
        self._hashes = np.empty(max(64, 2 * len(committed)) + 1, dtype=np.uint64)
        self._hashes[: len(committed) + 1] = path_hashes(committed)
        self.length = len(committed)
        self.rescored = 0
        self.clear()

    def clear(self) -> None:
        """Remove all nodes."""
        self.token: list[int] = []
        self.parent: list[int] = []
        self.hash: list[int] = []
        self.log_score: list[float] = []
        self.path_score: list[float] = []
        self.depth: list[int] = []
        self.children: list[list[int]] = []
        self.root_children: list[int] = []
        self._index: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.token)

    @property
    def root_hash(self) -> int:
        """Path hash of the committed path."""
        return int(self._hashes[self.length])

    def hash_of(self, node: int) -> int:
        """Path hash of a node, or of the root."""
        return self.root_hash if node == ROOT else self.hash[node]

    def children_of(self, node: int) -> list[int]:
        """Children of a node, or of the root, in order of insertion."""
        return self.root_children if node == ROOT else self.children[node]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens of the path from the root to a node, without the root, with the node."""
        tokens = []
        while node != ROOT:
            tokens.append(self.token[node])
            node = self.parent[node]
        return tokens[::-1]

    def path_of(self, tokens: Iterable[int]) -> list[int]:
        """Nodes along tokens below the root, as far as the tree has them."""
        path: list[int] = []
        node = ROOT
        for token in tokens:
            node = next((child for child in self.children_of(node) if self.token[child] == token), ROOT)
            if node == ROOT:
                break
            path.append(node)
        return path

    def find(self, draft: TreeSlice) -> list[int]:
        """The nodes of a slice of the present root's tree; -1 for those that are not in the tree any more."""
        hashes: list[int] = []
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            hashes.append(extend_hash(self.root_hash if parent == ROOT else hashes[parent], token))
        return [self._index.get(path, -1) for path in hashes]

    def add(self, parent: int, token: int, log_score: float) -> int | None:
        """Add a child, or raise the score of an existing one. Returns its index; None if the tree is full."""
        path = extend_hash(self.hash_of(parent), token)
        node = self._index.get(path)
        if node is not None:
            if log_score > self.log_score[node]:
                self.rescore({node: log_score})
            return node
        if len(self.token) >= self.capacity:
            return None
        node = len(self.token)
        self.token.append(token)
        self.parent.append(parent)
        self.hash.append(path)
        self.log_score.append(log_score)
        self.path_score.append(log_score + (0.0 if parent == ROOT else self.path_score[parent]))
        self.depth.append(1 if parent == ROOT else self.depth[parent] + 1)
        self.children.append([])
        self.children_of(parent).append(node)
        self._index[path] = node
        return node

    def add_leaves(self, parent: int, tokens: Sequence[int], log_scores: Sequence[float]) -> range:
        """Add children to a node without any, up to the tree's capacity. Scores above 0 count as 0.

        tokens: distinct. Returns the indices of the added nodes.
        """
        first = len(self.token)
        count = min(len(tokens), self.capacity - first)
        added = range(first, first + count)
        path, before = self.hash_of(parent), 0.0 if parent == ROOT else self.path_score[parent]
        hashes = [extend_hash(path, token) for token in tokens[:count]]
        scores = [min(score, 0.0) for score in log_scores[:count]]
        self.token += tokens[:count]
        self.parent += [parent] * count
        self.hash += hashes
        self.log_score += scores
        self.path_score += [before + score for score in scores]
        self.depth += [1 if parent == ROOT else self.depth[parent] + 1] * count
        self.children += [[] for _ in added]
        self.children_of(parent).extend(added)
        self._index.update(zip(hashes, added, strict=True))
        return added

    def rescore(self, scores: Mapping[int, float]) -> None:
        """Change the scores of some nodes, which may also fall."""
        gains = {node: score - self.log_score[node] for node, score in scores.items() if score != self.log_score[node]}
        if not gains:
            return
        self.rescored += len(gains)
        for node in gains:
            self.log_score[node] = scores[node]
        if len(gains) > _MANY:
            for node in range(min(gains), len(self)):
                parent = self.parent[node]
                self.path_score[node] = self.log_score[node] + (0.0 if parent == ROOT else self.path_score[parent])
            return
        for node, gain in gains.items():
            pending = [node]
            while pending:
                below = pending.pop()
                self.path_score[below] += gain
                pending.extend(self.children[below])

    def merge(self, proposal: Proposal) -> int:
        """Merge a proposal. Returns the number of its nodes that are in the tree now.

        Late, repeated and unknown proposals are harmless: nodes on the committed path are skipped; nodes beside it, and
        proposals with an unknown anchor, are dropped.
        """
        # A place is a node >= 0, a committed length L as -L - 3, ROOT for the root, or _DEAD for dropped nodes.
        anchor = self._find(proposal.anchor_length, proposal.anchor_hash)
        if anchor == _DEAD:
            return 0
        places: list[int] = []
        known = 0
        # fmax and fmin ignore NaN.
        scores = np.fmin(np.fmax(proposal.log_scores, _MIN_LOG_SCORE), 0.0)
        columns = (proposal.tokens.tolist(), proposal.parents.tolist(), scores.tolist())
        for token, parent, log_score in zip(*columns, strict=True):
            place = anchor if parent < 0 else places[parent]
            place = self._descend(place, token, log_score)
            places.append(place)
            known += place >= 0
        return known

    def _find(self, length: int, path: int) -> int:
        if length < self.length:
            return -length - 3 if int(self._hashes[length]) == path else _DEAD
        if length == self.length:
            return ROOT if self.root_hash == path else _DEAD
        return self._index.get(path, _DEAD)

    def _descend(self, place: int, token: int, log_score: float) -> int:
        if place == _DEAD:
            return _DEAD
        if place >= ROOT:
            node = self.add(place, token, log_score)
            return _DEAD if node is None else node
        length = -place - 3
        if extend_hash(int(self._hashes[length]), token) != int(self._hashes[length + 1]):
            return _DEAD
        return ROOT if length + 1 == self.length else -(length + 1) - 3

    def commit(self, tokens: NDArray[np.integer]) -> list[int]:
        """Move the root down along committed tokens, and remove the nodes that are not below it.

        tokens: [n]. Returns the old index of each remaining node, in the new order.
        """
        node: int | None = ROOT
        for token in tokens.tolist():
            path = extend_hash(self.root_hash, token)
            node = None if node is None else self._index.get(path)
            self.length += 1
            if self.length >= len(self._hashes):
                self._hashes = np.concatenate([self._hashes, np.empty_like(self._hashes)])
            self._hashes[self.length] = path
        if node is None:
            if self.token:
                self.clear()
            return []
        return list(range(len(self))) if node == ROOT else self._reroot(node)

    def _reroot(self, root: int) -> list[int]:
        below = {root}
        kept: list[int] = []
        for node in range(root + 1, len(self)):
            if self.parent[node] in below:
                below.add(node)
                kept.append(node)
        self._rebuild(root, kept)
        return kept

    def retain(self, nodes: Sequence[int]) -> None:
        """Remove all nodes but these, which are renumbered in the given order: parents before children."""
        self._rebuild(ROOT, nodes)

    def _rebuild(self, root: int, kept: Sequence[int]) -> None:
        old = self.token, self.parent, self.log_score
        renumbered = {root: ROOT}
        self.clear()
        for place, node in enumerate(kept):
            renumbered[node] = place
            self.add(renumbered[old[1][node]], old[0][node], old[2][node])

    def select(
        self,
        max_nodes: int,
        max_depth: int | None = None,
        max_children: int | None = None,
        least_score: float = -math.inf,
        admits: Callable[[int], bool] | None = None,
    ) -> TreeSlice:
        """The most probable nodes whose parents are selected, too, best first.

        max_nodes, max_depth, max_children: limits in nodes, levels and nodes per parent. least_score: minimum
        natural-log path probability. admits: returns False for nodes that must not be selected; called for nodes whose
        parent is selected
        """
        chosen = self.best_nodes(max_nodes, max_depth, max_children, least_score, admits)
        if not chosen:
            return EMPTY_SLICE
        row = {node: i for i, node in enumerate(chosen)}
        row[ROOT] = ROOT
        return TreeSlice(
            np.array([self.token[i] for i in chosen], dtype=np.uint32),
            np.array([row[self.parent[i]] for i in chosen], dtype=np.int32),
            np.array([self.depth[i] for i in chosen], dtype=np.int32),
            np.array([self.path_score[i] for i in chosen], dtype=np.float32),
        )

    def best_nodes(
        self,
        max_nodes: int,
        max_depth: int | None = None,
        max_children: int | None = None,
        least_score: float = -math.inf,
        admits: Callable[[int], bool] | None = None,
    ) -> list[int]:
        """The nodes of `select`."""
        chosen: list[int] = []
        if max_nodes <= 0 or not self.token:
            return chosen
        frontier: list[tuple[float, int]] = []
        self._push_children(frontier, ROOT, max_children)
        while frontier and len(chosen) < max_nodes:
            cost, node = heapq.heappop(frontier)
            if -cost < least_score:
                break
            if admits is not None and not admits(node):
                continue
            chosen.append(node)
            if max_depth is None or self.depth[node] < max_depth:
                self._push_children(frontier, node, max_children)
        return chosen

    def _push_children(self, frontier: list[tuple[float, int]], node: int, max_children: int | None) -> None:
        children = self.children_of(node)
        if max_children is not None and len(children) > max_children:
            children = sorted(children, key=lambda i: -self.path_score[i])[:max_children]
        for child in children:
            heapq.heappush(frontier, (-self.path_score[child], child))
