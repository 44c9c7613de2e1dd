"""The KV cache of one session: the prefix KV of its committed tokens, and a scratch for the nodes of its draft tree.

    prefix KV   pages, in order of position     0 ........ computed-1 | room for further commits
    scratch     SCRATCH_SLOTS slots             keys and values of expanded nodes, in any order

A row holds token j + `shift` at slot j. The shift is 0 for models that read tokens alone. It is 1 for feature-based
heads, whose row j pairs feature j with token j + 1. Their expanded nodes were computed from the head's own features: in
the prefix KV they are provisional, until they are computed again from the target's features.

    rows    0 ........ settled-1 | settled ... computed-1 | computed ... length-1-shift
            final                | provisional            | to be computed

A node in the scratch has a bit mask over the slots of its ancestors. When nodes are committed, their rows move from the
scratch into the prefix KV; nodes that leave the tree free their slots.

Full pages of the prefix KV go to a prefix cache, so that sessions with the same beginning need not compute them.

Invariant: the root's children can be known only if computed = length - shift; otherwise the tree is empty.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache, SharedTable
from outrider.paging.table import PageTable
from outrider.placement.memory import SCRATCH_SLOTS
from outrider.speculation.tree import ROOT

__all__ = ["SCRATCH_SLOTS", "PrefixKV"]


class PrefixKV:
    """Prefix KV and scratch of one session; both are leased while it runs."""

    def __init__(self, prefix: PrefixCache, tokens: NDArray[np.uint32], namespace: str = "", shift: int = 0) -> None:
        """tokens: the committed ones. namespace: of the prefix cache. Raises OutOfPages."""
        # Pages are found by the tokens of their rows; a row also depends on the tokens before the shift.
        namespace = f"{tokens[:shift].tolist()} {namespace}" if shift else namespace
        self.table = SharedTable(prefix, namespace)
        self.scratch = PageTable(prefix.allocator)
        self.shift = shift
        self.computed = 0
        self.settled = 0
        self._slot: list[int] = []  # by node: its scratch slot; -1 if it is not expanded
        self._mask: list[int] = []  # by node: bits of its own and its ancestors' slots
        self._free = list(range(SCRATCH_SLOTS - 1, -1, -1))
        self._scratch_slots = np.empty(0, np.int64)
        self._slots: list[int] = []  # the same
        self._vacated = 0  # bits of the slots whose rows move into the prefix KV with the present commit
        try:
            self.attach(tokens)
            self.scratch.reserve(SCRATCH_SLOTS)
            self._scratch_slots = self.scratch.slots(0, SCRATCH_SLOTS)
            self._slots = self._scratch_slots.tolist()
            self.table.reserve(len(tokens))
        except Exception:
            self.release()
            raise

    @property
    def tables(self) -> Sequence[PageTable]:
        """Page tables of prefix KV and scratch, for the audit."""
        return self.table, self.scratch

    def attach(self, tokens: NDArray[np.uint32]) -> None:
        """Take matching pages from the prefix cache, up to the row before the last committed token's."""
        if self.computed == self.settled:
            self.settled += self.table.attach(tokens[self.shift : -1], self.settled)
            self.computed = self.settled

    def publish(self, tokens: NDArray[np.uint32], pending: int = 0) -> None:
        """Give full pages to the prefix cache. tokens: the committed ones; pending: rows at the end still to move."""
        self.table.publish(tokens[self.shift : self.shift + self.settled - (0 if self.shift else pending)])

    def feed(self, count: int) -> None:
        """`count` rows behind the settled ones were computed from committed tokens and the target's features alone."""
        self.settled += count
        self.computed = max(self.computed, self.settled)

    def forget_provisional(self) -> None:
        """The provisional rows will be computed again; the tree is empty."""
        self.computed = self.settled
        self.renumber([], ())

    def release(self) -> None:
        """Release all pages."""
        self.table.release()
        self.scratch.release()

    @property
    def free_slots(self) -> int:
        """Number of free slots of the scratch."""
        return len(self._free)

    @property
    def scratch_slots(self) -> NDArray[np.int64]:
        """Slots of the scratch, [SCRATCH_SLOTS]."""
        return self._scratch_slots

    def slot(self, node: int) -> int:
        """Index of an expanded node's slot in the scratch."""
        return self._slot[node]

    def pool_slot(self, node: int) -> int:
        """Slot of the pool with the row of an expanded node, or of the root."""
        if node == ROOT:
            return self.table.slot(self.computed - 1)
        return self._slots[self._slot[node]]

    def mask(self, node: int) -> int:
        """Slots of an expanded node and its ancestors, as bits; 0 for the root."""
        return 0 if node == ROOT else self._mask[node]

    def expand(self, node: int, parent: int) -> int:
        """Assign a scratch slot to a node, below an expanded parent or the root. Returns its index."""
        missing = node + 1 - len(self._slot)
        self._slot += [-1] * missing
        self._mask += [0] * missing
        assert self._slot[node] < 0, "a node is expanded once"
        assert parent == ROOT or self._slot[parent] >= 0, "a parent is expanded before its children"
        slot = self._free.pop()
        self._slot[node] = slot
        self._mask[node] = self.mask(parent) | 1 << slot
        return slot

    def place(self, expanded: Sequence[tuple[int, int, int]]) -> None:
        """A program has expanded nodes into free slots that it chose.

        expanded: node, parent and slot of each, parents before children
        """
        missing = max((node for node, *_ in expanded), default=-1) + 1 - len(self._slot)
        self._slot += [-1] * missing
        self._mask += [0] * missing
        for node, parent, slot in expanded:
            assert self._slot[node] < 0, "a node is expanded once"
            self._slot[node] = slot
            self._mask[node] = self.mask(parent) | 1 << slot
        taken = {slot for *_, slot in expanded}
        self._free = [slot for slot in self._free if slot not in taken]

    def accept(self, length: int, count: int, path: list[int]) -> list[tuple[int, int]]:
        """Tokens are about to be committed, of which `path` are nodes. length: committed tokens before.

        Returns the rows to move, as (slot, slot) of the pool. Raises OutOfPages without any change.
        """
        self.table.reserve(length + count)
        moves: list[tuple[int, int]] = []
        for node in path:
            if node >= len(self._slot) or self._slot[node] < 0:
                break
            complete = self.computed == length - self.shift + len(moves)
            assert complete, "nodes are expanded only once the prefix KV is complete"
            moves.append((self.pool_slot(node), self.table.slot(self.computed)))
            self._vacated |= 1 << self._slot[node]
            self.computed += 1
        if not self.shift:
            self.settled = self.computed
        return moves

    def renumber(self, kept: list[int], expanded: Container[int]) -> None:
        """The root has moved down. kept: old index of each surviving node; expanded: nodes that stay expanded."""
        known = len(self._slot)
        self._slot = [self._slot[old] if old < known and new in expanded else -1 for new, old in enumerate(kept)]
        self._mask = [self._mask[old] & ~self._vacated if old < known else 0 for old in kept]
        self._vacated = 0
        used = set(self._slot)
        self._free = [slot for slot in range(SCRATCH_SLOTS - 1, -1, -1) if slot not in used]
