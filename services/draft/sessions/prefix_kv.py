"""The KV memory of one session: a trunk of committed tokens, and a scratch for the nodes of its speculation tree.

    trunk     pages, in order of position     0 ........ computed-1 | room for what is committed next
    scratch   SCRATCH_SLOTS slots             keys and values of expanded nodes, in any order

A row holds token j + `shift` at slot j: shift is 0 for models that read tokens alone, and 1 for heads that are fed with
the target's features, whose row j pairs feature j with token j + 1. Their expanded nodes have been computed from the
head's own features: in the trunk they are provisional, until they are computed again with the target's.

    rows    0 ........ settled-1 | settled ... computed-1 | computed ... length-1-shift
            final                | provisional            | to be computed

A node in the scratch remembers, as a bit mask over slots, which others are its ancestors. When nodes are committed,
their rows move from the scratch into the trunk; what is no longer in the tree frees its slot.

Full pages of the trunk go to a prefix cache, so that a session that begins with the same tokens need not compute them.

Ruler: the root's children can be known only if computed = length - shift; else it is less and the tree is empty.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache, SharedTable
from outrider.paging.table import PageTable
from outrider.speculation.tree import ROOT

SCRATCH_SLOTS = 64


class Trunk:
    """Trunk and scratch of one session; both are leased while it runs."""

    def __init__(self, prefix: PrefixCache, tokens: NDArray[np.uint32], namespace: str = "", shift: int = 0) -> None:
        """tokens: the committed ones. namespace: of the prefix cache. Raises OutOfPages."""
        # Pages are found by the tokens of their rows, and a row knows all before it: the shifted ones, too.
        namespace = f"{tokens[:shift].tolist()} {namespace}" if shift else namespace
        self.table = SharedTable(prefix, namespace)
        self.scratch = PageTable(prefix.allocator)
        self.shift = shift
        self.computed = 0
        self.settled = 0
        self._slot: list[int] = []  # of each node; -1 if it is not expanded
        self._mask: list[int] = []  # of each node: its own and its ancestors' slots
        self._free = list(range(SCRATCH_SLOTS - 1, -1, -1))
        self._scratch_slots = np.empty(0, np.int64)
        self._vacated = 0  # slots whose rows move into the trunk with the commit under way
        try:
            self.attach(tokens)
            self.scratch.reserve(SCRATCH_SLOTS)
            self._scratch_slots = self.scratch.slots(0, SCRATCH_SLOTS)
            self.table.reserve(len(tokens))
        except Exception:
            self.release()
            raise

    @property
    def tables(self) -> Sequence[PageTable]:
        """Trunk and scratch, for the audit."""
        return self.table, self.scratch

    def attach(self, tokens: NDArray[np.uint32]) -> None:
        """Take from the prefix cache what comes next of the committed tokens, but never the last one's row."""
        if self.computed == self.settled:
            self.settled += self.table.attach(tokens[self.shift : -1], self.settled)
            self.computed = self.settled

    def publish(self, tokens: NDArray[np.uint32], pending: int = 0) -> None:
        """Give full pages to the prefix cache. tokens: the committed ones; pending: rows at the end still to move."""
        self.table.publish(tokens[self.shift : self.shift + self.settled - (0 if self.shift else pending)])

    def feed(self, count: int) -> None:
        """Rows behind the settled ones have been computed, with nothing but facts."""
        self.settled += count
        self.computed = max(self.computed, self.settled)

    def forget_provisional(self) -> None:
        """The rows behind the settled ones will be computed again; so will those of all nodes, which are gone."""
        self.computed = self.settled
        self.renumber([], ())

    def release(self) -> None:
        """Give all pages back."""
        self.table.release()
        self.scratch.release()

    @property
    def scratch_slots(self) -> NDArray[np.int64]:
        """Slots of the scratch, [SCRATCH_SLOTS]."""
        return self._scratch_slots

    def slot(self, node: int) -> int:
        """The place of an expanded node in the scratch."""
        return self._slot[node]

    def mask(self, node: int) -> int:
        """Slots of an expanded node and its ancestors, as bits; none for the root."""
        return 0 if node == ROOT else self._mask[node]

    def expand(self, node: int, parent: int) -> int:
        """Give a node a slot of the scratch, below an expanded parent or the root. Returns the slot."""
        missing = node + 1 - len(self._slot)
        self._slot += [-1] * missing
        self._mask += [0] * missing
        assert self._slot[node] < 0, "a node is expanded once"
        assert parent == ROOT or self._slot[parent] >= 0, "a parent is expanded before its children"
        slot = self._free.pop()
        self._slot[node] = slot
        self._mask[node] = self.mask(parent) | 1 << slot
        return slot

    def accept(self, length: int, count: int, path: list[int]) -> list[tuple[int, int]]:
        """Tokens are about to be committed, of which `path` are nodes. length: committed tokens before.

        Returns the rows to move, as (slot, slot) of the pool. Raises OutOfPages and changes nothing then.
        """
        self.table.reserve(length + count)
        moves: list[tuple[int, int]] = []
        scratch = self._scratch_slots
        for node in path:
            if node >= len(self._slot) or self._slot[node] < 0:
                break
            complete = self.computed == length - self.shift + len(moves)
            assert complete, "nodes are expanded only once the trunk is complete"
            target = self.table.slots(self.computed, self.computed + 1)
            moves.append((int(scratch[self._slot[node]]), int(target[0])))
            self._vacated |= 1 << self._slot[node]
            self.computed += 1
        if not self.shift:
            self.settled = self.computed
        return moves

    def renumber(self, kept: list[int], expanded: Container[int]) -> None:
        """The tree has moved its root down. kept: old index of each surviving node; expanded: which of them stay so."""
        known = len(self._slot)
        self._slot = [self._slot[old] if old < known and new in expanded else -1 for new, old in enumerate(kept)]
        self._mask = [self._mask[old] & ~self._vacated if old < known else 0 for old in kept]
        self._vacated = 0
        used = set(self._slot)
        self._free = [slot for slot in range(SCRATCH_SLOTS - 1, -1, -1) if slot not in used]
