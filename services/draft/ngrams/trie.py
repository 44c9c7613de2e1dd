"""A trie of token paths, shared by all sessions, after SGLang's NGRAM speculation: the plain twin of csrc/trie.h.

Inserting a sequence stores, from every start with more tokens behind it than the shortest window, the path of up to
`branch_length` tokens. A node counts its insertions (frequency) and has the number of the last one (recency). A full
trie evicts the least recent nodes, deeper before shallower ones, so that an evicted node is always a leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter


class TrieNode:
    """A stored path. children: by token, the most recent last; stamp: number of the last insertion."""

    __slots__ = ("children", "depth", "frequency", "parent", "stamp", "token")

    def __init__(self, parent: TrieNode | None, token: int, stamp: int) -> None:
        self.parent = parent
        self.token = token
        self.stamp = stamp
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.frequency = 1
        self.children: dict[int, TrieNode] = {}

    def recent(self, count: int) -> list[TrieNode]:
        """Up to `count` children, the most recent first."""
        return list(islice(reversed(self.children.values()), count))

    def frequent(self, count: int, among: int) -> list[TrieNode]:
        """Up to `count` of the `among` most recent children, the most frequent first; ties go to the most recent."""
        return heapq.nlargest(count, self.recent(among), key=_FREQUENCY)


_FREQUENCY = attrgetter("frequency")


class Trie:
    """Stored paths, at most `capacity` nodes. Owned by one thread."""

    def __init__(self, capacity: int, branch_length: int, min_window: int, max_window: int) -> None:
        """branch_length: longest path. min_window, max_window: shortest and longest suffix that is looked up."""
        self.capacity = capacity
        self.branch_length = branch_length
        self.min_window = min_window
        self.max_window = max_window
        self._stamp = 0
        self.clear()

    def clear(self) -> None:
        """Drop all paths."""
        self.root = TrieNode(None, -1, 0)
        self._size = 0
        # Every node is in the queue once, with a stamp that may be out of date. It is built at the first eviction.
        self._queue: list[tuple[int, int, int, TrieNode]] | None = None

    def __len__(self) -> int:
        return self._size

    def insert(
        self, tokens: Sequence[int], namespace_id: Sequence[int] = (), first: int = 0, stop: int | None = None
    ) -> None:
        """Store the paths of a sequence that begin at `first` or later, before `stop`. namespace_id: before each."""
        last = len(tokens) - self.min_window
        for start in range(first, last if stop is None else min(stop, last)):
            self._insert_path([*namespace_id, *tokens[start : start + self.branch_length]])

    def _insert_path(self, path: Sequence[int]) -> None:
        self._stamp = stamp = self._stamp + 1
        node = self.root
        for token in path:
            children = node.children
            child = children.pop(token, None)
            if child is None:
                if self._size >= self.capacity and not self._evict(stamp):
                    return
                child = TrieNode(node, token, stamp)
                self._size += 1
                if self._queue is not None:
                    heapq.heappush(self._queue, (stamp, -child.depth, id(child), child))
            else:
                child.frequency += 1
                child.stamp = stamp
            children[token] = child
            node = child

    def _evict(self, current: int) -> bool:
        """Remove the least recent node. False if all nodes belong to the current insertion."""
        if self._queue is None:
            self._queue = [(node.stamp, -node.depth, id(node), node) for node in self._nodes()]
            heapq.heapify(self._queue)
        while True:
            stamp, order, key, node = self._queue[0]
            if node.stamp != stamp:
                heapq.heapreplace(self._queue, (node.stamp, order, key, node))
                continue
            if stamp == current:
                return False
            heapq.heappop(self._queue)
            assert node.parent is not None
            assert not node.children
            del node.parent.children[node.token]
            self._size -= 1
            return True

    def _nodes(self) -> Iterator[TrieNode]:
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def match(self, context: Sequence[int], namespace_id: Sequence[int] = ()) -> list[tuple[TrieNode, int]]:
        """Suffixes of a context that are stored with children, as (node, window), longest first."""
        anchors: list[tuple[TrieNode, int]] = []
        for window in range(min(len(context), self.max_window), self.min_window - 1, -1):
            node = self.root
            for token in (*namespace_id, *context[-window:]):
                child = node.children.get(token)
                if child is None:
                    break
                node = child
            else:
                if node.children:
                    anchors.append((node, window))
        return anchors
