"""The plain twin of the compiled n-grams: the same results from Python objects, about 300 bytes a node.

It serves where no compiler is available, and is the reference in tests.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.noise import gumbel_from_bits, token_bits
from services.draft.ngrams.base import (
    COUNTED,
    FADING,
    NO_NAMESPACE,
    POOL,
    PRIOR_WEIGHT,
    Continuations,
    NgramOptions,
    Ngrams,
)  # fmt: skip
from services.draft.ngrams.trie import Trie, TrieNode


class PlainNgrams(Ngrams):
    """N-grams in Python."""

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self.trie = Trie(
            options.capacity, options.branch_length, options.min_match_window_size, options.max_match_window_size
        )
        size = options.max_match_window_size + 1
        self._trials = np.zeros((2, size))
        self._hits = np.zeros((2, size))

    def __len__(self) -> int:
        return len(self.trie)

    def insert(
        self, tokens: NDArray[np.uint32], namespace_id: int = NO_NAMESPACE, first: int = 0, stop: int | None = None
    ) -> None:
        """As of Ngrams."""
        self.trie.insert(tokens.tolist(), _prefix(namespace_id), first, stop)

    def commit(
        self,
        tokens: NDArray[np.uint32],
        fresh: int,
        *,
        noisy: bool,
        namespace_id: int = NO_NAMESPACE,
        keep: bool = True,
    ) -> None:
        """As of Ngrams."""
        path = tokens.tolist()
        for place in range(max(len(path) - fresh, 1), len(path)):
            self._observe(path[:place], path[place], int(noisy), namespace_id)
        if keep:
            self.trie.insert(path[-(self.options.branch_length + fresh - 1) :], _prefix(namespace_id))

    def _observe(self, context: list[int], token: int, noisy: int, namespace_id: int) -> None:
        known = 0
        for node, window in self.trie.match(context, _prefix(namespace_id)):
            found = min(len(node.children), POOL)
            if found <= known < POOL:
                continue  # this suffix proposes no token that longer suffixes do not
            known = found
            hit = token in node.children
            self._trials[noisy, window] = self._trials[noisy, window] * FADING + 1.0
            self._hits[noisy, window] = self._hits[noisy, window] * FADING + hit
            if hit:
                return

    def look_up(
        self, context: NDArray[np.uint32], keys: NDArray[np.uint32] | None, namespace_id: int = NO_NAMESPACE
    ) -> Continuations:
        """As of Ngrams."""
        lookup = _Lookup(self, keys)
        return lookup.run(self.trie.match(context.tolist(), _prefix(namespace_id)))

    def accuracy(self, length: int, *, noisy: bool) -> float:
        """As of Ngrams."""
        m = min(length, self.options.max_match_window_size)
        prior = m / (m + 2)
        return float((self._hits[int(noisy), m] + PRIOR_WEIGHT * prior) / (self._trials[int(noisy), m] + PRIOR_WEIGHT))

    def clear(self) -> None:
        """As of Ngrams."""
        self.trie.clear()


def _prefix(namespace_id: int) -> tuple[int, ...]:
    return () if namespace_id == NO_NAMESPACE else (namespace_id,)


class _Lookup:
    """One walk below the stored suffixes of a context; equal tokens below the same parent are one node."""

    def __init__(self, ngrams: PlainNgrams, keys: NDArray[np.uint32] | None) -> None:
        self._options = ngrams.options
        self._ngrams = ngrams
        self._keys = keys
        self._draft = Continuations([], [], [])
        self._depths: list[int] = []
        self._index: dict[tuple[int, int], int] = {}

    def run(self, anchors: Sequence[tuple[TrieNode, int]]) -> Continuations:
        """Collect continuations of the anchors, (node, window) pairs, longest first."""
        if self._options.match_type == "BFS":
            self._by_recency(anchors)
        else:
            self._by_frequency(anchors)
        return self._draft

    @property
    def _full(self) -> bool:
        return len(self._draft.tokens) >= self._options.draft_token_num - 1

    def _add(self, parent: int, token: int, probability: float) -> int:
        """Add a node, or raise its score. A child of the root keeps the score of the longest suffix."""
        score = float(np.float32(math.log(probability)))
        node = self._index.get((parent, token))
        if node is None:
            node = self._index[parent, token] = len(self._draft.tokens)
            self._draft.tokens.append(token)
            self._draft.parents.append(parent)
            self._depths.append(1 if parent < 0 else self._depths[parent] + 1)
            self._draft.log_scores.append(score)
        elif parent >= 0:
            self._draft.log_scores[node] = max(self._draft.log_scores[node], score)
        return node

    def _share_of(self, rest: float, anchor: TrieNode, window: int) -> tuple[float, float]:
        """Split the remaining probability into an anchor's share and the rest; both are all of it if the anchor
        proposes no new token.
        """
        pool = anchor.recent(POOL) if self._options.match_type == "BFS" else anchor.frequent(POOL, COUNTED)
        if all((-1, child.token) in self._index for child in pool):
            return rest, rest
        mass = rest * self._accuracy(window)
        return mass, rest - mass

    def _by_recency(self, anchors: Sequence[tuple[TrieNode, int]]) -> None:
        options = self._options
        windows = options.max_match_window_size - options.min_match_window_size + 1
        scale = (options.max_bfs_breadth - options.min_bfs_breadth) / windows
        rest = 1.0
        for anchor, window in anchors:
            mass, rest = self._share_of(rest, anchor, window)
            breadth = (options.max_match_window_size - window) * scale + options.min_bfs_breadth
            queue = deque([(-1, breadth, anchor)])
            while queue:
                parent, breadth, node = queue.popleft()
                for child, share in self._children(node, max(1, int(breadth)), parent):
                    if self._full:
                        return
                    place = self._add(parent, child.token, share * self._edge_accuracy(parent, window, mass))
                    queue.append((place, breadth - scale, child))

    def _by_frequency(self, anchors: Sequence[tuple[TrieNode, int]]) -> None:
        # Entries: (-probability, order of arrival, parent in the draft, trie node, window, share of the edge, trust).
        # The order of arrival breaks ties before nodes are compared.
        heap: list[tuple[float, int, int, TrieNode, int, float, float]] = []
        arrivals = 0
        rest = 1.0
        for anchor, anchor_window in anchors:
            mass, rest = self._share_of(rest, anchor, anchor_window)
            probability, parent, node, window = 1.0, -1, anchor, anchor_window
            while True:
                for child, share in self._children(node, self._options.max_bfs_breadth, parent):
                    arrivals += 1
                    entry = (-probability * share, arrivals, parent, child, window, share, mass)
                    heapq.heappush(heap, entry)
                if not heap or self._full:
                    break
                negative, _, above, node, window, share, mass = heapq.heappop(heap)
                probability = -negative
                parent = self._add(above, node.token, share * self._edge_accuracy(above, window, mass))

    def _accuracy(self, length: int) -> float:
        return self._ngrams.accuracy(length, noisy=self._keys is not None)

    def _edge_accuracy(self, parent: int, window: int, mass: float) -> float:
        return mass if parent < 0 else self._accuracy(window + self._depths[parent])

    def _children(self, node: TrieNode, count: int, parent: int) -> list[tuple[TrieNode, float]]:
        """Up to `count` children, best first, with their share of the probability that is not yet proposed."""
        noisy = self._keys is not None and len(node.children) > 1
        if self._options.match_type == "PROB":
            pool = node.frequent(POOL if noisy else count, COUNTED)
        else:
            pool = node.recent(POOL)
        weights = [float(child.frequency) for child in pool]
        order = list(range(len(pool)))
        if noisy:
            weights = self._with_noise(pool, 0 if parent < 0 else self._depths[parent])
            order.sort(key=lambda i: -weights[i])
            weights = [math.exp(weight - max(weights)) for weight in weights]
        fresh = [parent >= 0 or (-1, child.token) not in self._index for child in pool]
        total = sum(weight for weight, new in zip(weights, fresh, strict=True) if new)
        shares = [weights[i] / total if total else 1.0 for i in order[:count]]
        return [(pool[i], max(min(share, 1.0), 1e-6)) for i, share in zip(order[:count], shares, strict=True)]

    def _with_noise(self, pool: Sequence[TrieNode], depth: int) -> list[float]:
        assert self._keys is not None
        tokens = np.array([child.token for child in pool])
        noise = gumbel_from_bits(token_bits(self._keys[depth][None], tokens)).reshape(-1).tolist()
        return [math.log(child.frequency) + gumbel for child, gumbel in zip(pool, noise, strict=True)]
