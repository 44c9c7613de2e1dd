"""NGRAM: continues a text as earlier texts went on. Needs no model and no device.

A lookup walks the trie below every stored suffix of the context and collects up to N - 1 nodes, by recency (BFS) or by
frequency (PROB), as SGLang does. Where a session samples, siblings are ranked by log-share + noise instead, because the
target draws with the same noise. Lookups for the leaves of the tree, whose context is the text and the path to the
leaf, carry the draft on while the target verifies.

Scores: a suffix of length m is trusted with m / (m + 2), what longer suffixes leave over going to the shorter ones;
children share that by frequency. The target calibrates them by what it accepts.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outrider.speculation.noise import gumbel_from_bits, token_bits
from services.draft.drafters.base import Drafter, Growth, Wish
from services.draft.drafters.trie import Trie, TrieNode
from services.draft.session import DraftSession

# Where siblings are ranked with noise, no more than these are looked at.
_NOISY_CHILDREN = 32
_LOOKUPS_A_ROUND = 64


@dataclass(frozen=True)
class NgramOptions:
    """Flags of the lookup, under SGLang's names. draft_token_num counts the root."""

    match_type: Literal["BFS", "PROB"] = "BFS"
    min_match_window_size: int = 1
    max_match_window_size: int = 12
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    branch_length: int = 18
    capacity: int = 10_000_000
    draft_token_num: int = 12
    insert_prompts: bool = True


class _Draft:
    """Nodes of one lookup under construction; the same token below the same parent is one node."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.log_scores: list[float] = []
        self._index: dict[tuple[int, int], int] = {}

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.limit

    def add(self, parent: int, token: int, probability: float) -> int:
        """Add a node, or raise its score. The root's children gather what every suffix gives them."""
        node = self._index.get((parent, token))
        if node is None:
            node = self._index[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
            self.log_scores.append(math.log(probability))
        elif parent < 0:
            self.log_scores[node] = math.log(min(math.exp(self.log_scores[node]) + probability, 1.0))
        else:
            self.log_scores[node] = max(self.log_scores[node], math.log(probability))
        return node


class NgramDrafter(Drafter):
    """Drafts for all sessions from one trie."""

    name = "NGRAM"
    expansions = 256
    from_parents = False

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self.trie = Trie(
            options.capacity, options.branch_length, options.min_match_window_size, options.max_match_window_size
        )

    def open(self, session: DraftSession) -> None:
        """Store what the session has so far, so that its answer can copy from its prompt."""
        if self.options.insert_prompts:
            self.trie.insert(session.tokens.tolist())

    def close(self, session: DraftSession) -> None:
        """What was learned stays."""

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """A longer context may match more: the root is looked up again."""
        del session, count, path
        return False

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Store the end of the session."""
        del kept
        self.trie.insert(session.tokens[-self.options.branch_length :].tolist())

    def grow(self, wishes: Sequence[Wish]) -> list[Growth]:
        """Look the best wishes up; the round is short, so that new roots do not wait for far leaves."""
        return [self._look_up(wish.session, wish.node) for wish in wishes[:_LOOKUPS_A_ROUND]]

    def warm_up(self) -> None:
        """Nothing to do."""

    def _look_up(self, session: DraftSession, node: int) -> Growth:
        path = session.tree.path_tokens(node)
        window = self.options.max_match_window_size
        context = (session.tokens[-window:].tolist() + path)[-window:]
        lookup = _Lookup(self.options, session, len(path))
        draft = lookup.run(self.trie.match(context))
        return Growth(session, node, draft.tokens, draft.parents, draft.log_scores)


class _Lookup:
    """One walk below the matching suffixes of a context."""

    def __init__(self, options: NgramOptions, session: DraftSession, depth: int) -> None:
        """depth: of the node whose continuation is looked up, 0 for the root."""
        self._options = options
        self._session = session
        self._depth = depth
        self._draft = _Draft(options.draft_token_num - 1)

    def run(self, anchors: Sequence[tuple[TrieNode, int]]) -> _Draft:
        """Collect continuations of the anchors, (node, window) pairs, longest first."""
        if self._options.match_type == "BFS":
            self._by_recency(anchors)
        else:
            self._by_frequency(anchors)
        return self._draft

    def _by_recency(self, anchors: Sequence[tuple[TrieNode, int]]) -> None:
        options = self._options
        windows = options.max_match_window_size - options.min_match_window_size + 1
        step = (options.max_bfs_breadth - options.min_bfs_breadth) / windows
        rest = 1.0
        for anchor, window in anchors:
            trust = rest * _trust(window)
            rest -= trust
            breadth = (options.max_match_window_size - window) * step + options.min_bfs_breadth
            queue = deque([(-1, breadth, anchor)])
            while queue:
                parent, breadth, node = queue.popleft()
                for child, share in self._children(node, max(1, int(breadth)), parent):
                    if self._draft.full:
                        return
                    place = self._draft.add(parent, child.token, share * self._edge_trust(parent, window, trust))
                    queue.append((place, breadth - step, child))

    def _by_frequency(self, anchors: Sequence[tuple[TrieNode, int]]) -> None:
        # Entries: (-probability, order of arrival, parent in the draft, trie node, window, share of the edge, trust).
        # The order of arrival keeps ties apart before nodes are compared.
        heap: list[tuple[float, int, int, TrieNode, int, float, float]] = []
        arrivals = 0
        rest = 1.0
        for anchor, anchor_window in anchors:
            anchor_trust = rest * _trust(anchor_window)
            rest -= anchor_trust
            expanding: tuple[float, int, TrieNode] | None = (1.0, -1, anchor)
            window, trust = anchor_window, anchor_trust
            while True:
                if expanding is not None:
                    probability, parent, node = expanding
                    for child, share in self._children(node, self._options.max_bfs_breadth, parent):
                        arrivals += 1
                        entry = (-probability * share, arrivals, parent, child, window, share, trust)
                        heapq.heappush(heap, entry)
                if not heap or self._draft.full:
                    break
                negative, _, parent, child, window, share, trust = heapq.heappop(heap)
                place = self._draft.add(parent, child.token, share * self._edge_trust(parent, window, trust))
                expanding = (-negative, place, child)

    def _edge_trust(self, parent: int, window: int, trust: float) -> float:
        return trust if parent < 0 else _trust(window + self._draft.depths[parent])

    def _children(self, node: TrieNode, count: int, parent: int) -> list[tuple[TrieNode, float]]:
        """Up to `count` children, best first, with their share of what follows the node."""
        frequent = self._options.match_type == "PROB"
        if not self._session.sampling.greedy and len(node.children) > 1:
            return self._noisy_children(node, count, parent, frequent)
        chosen = node.frequent(count) if frequent else node.recent(count)
        total = sum(child.frequency for child in (chosen if frequent else node.recent(_NOISY_CHILDREN)))
        return [(child, min(child.frequency / total, 1.0)) for child in chosen]

    def _noisy_children(self, node: TrieNode, count: int, parent: int, frequent: bool) -> list[tuple[TrieNode, float]]:
        pool = node.frequent(_NOISY_CHILDREN) if frequent else node.recent(_NOISY_CHILDREN)
        position = self._session.length + self._depth + (0 if parent < 0 else self._draft.depths[parent])
        keys = self._session.keys(np.array([position]))
        noise = gumbel_from_bits(token_bits(keys, np.array([child.token for child in pool])))
        log_shares = np.log(np.array([child.frequency for child in pool], dtype=np.float64)) + noise
        order = np.argsort(-log_shares, kind="stable")[:count].tolist()
        shares = np.exp(log_shares - log_shares.max())
        shares /= shares.sum()
        return [(pool[i], max(float(shares[i]), 1e-6)) for i in order]


def _trust(window: int) -> float:
    """Chance that what followed a stored suffix of some tokens follows again."""
    return window / (window + 2)
