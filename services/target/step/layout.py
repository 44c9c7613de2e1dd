"""Where the rows of a batch lie: one span of rows a session, as objects and as arrays.

    slot position   0 ........ start-1 | start .... start+committed-1 | ...... start+rows-1
                    in the cache       | committed rows (last = root) | draft nodes, in slice order
    sees            -                  | all before it, itself        | all committed, its ancestors, itself

A node's slot position is its place in the span; its *logical* position, which RoPE and windows use, is the root's plus
its depth. Siblings share a logical position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outrider.paging.allocator import NULL_PAGE
from outrider.speculation.tree import ROOT

SHORT = 4
"""Rows of a short span: plain ones, and some nodes."""


class Extent(IntEnum):
    """How many rows the spans of a batch have. Kernels do less where they need not know of more."""

    PLAIN = 1
    """One each, which is no node."""
    SHORT = 2
    """SHORT at most."""
    LONG = 3
    """Any number."""


@dataclass(frozen=True)
class Span:
    """The rows first .. first + rows - 1 of a batch, all of one session.

    start:     tokens of the session that are in the cache already
    committed: rows that are committed tokens; the others are draft nodes
    pages:     [pages] int32, the pages of the session's keys in order, cached ones and the span's own; page_size in
               tokens. A view of the session's table, which lasts as long as the step.
    positions: [rows] int64, logical positions
    parents:   [nodes] int32, the parent of each draft node among them, or ROOT
    """

    first: int
    rows: int
    start: int
    committed: int
    pages: NDArray[np.int32]
    page_size: int
    positions: NDArray[np.int64]
    parents: NDArray[np.int32]

    @property
    def keys(self) -> int:
        """Keys that the span's last committed row and its nodes may see, in tokens."""
        return self.start + self.rows

    @property
    def nodes(self) -> int:
        """Draft nodes."""
        return self.rows - self.committed

    @property
    def inert(self) -> bool:
        """True for padding: rows of nobody, which write NULL_PAGE and whose results nobody reads."""
        return len(self.pages) > 0 and int(self.pages[0]) == NULL_PAGE

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """The slots of the session's keys in order, cached ones and the span's own. [keys] int64."""
        return self.slots_from(0)

    @cached_property
    def tree_mask(self) -> NDArray[np.bool_]:
        """Which nodes a node sees: itself and its ancestors. [nodes, nodes] bool."""
        return tree_mask(self.parents)

    def slots_from(self, first: int) -> NDArray[np.int64]:
        """Slots of the keys first, first + 1, ... [keys - first] int64."""
        keys = np.arange(first, self.keys)
        return self.pages[keys // self.page_size].astype(np.int64) * self.page_size + keys % self.page_size


@dataclass(frozen=True)
class Layout:
    """The S spans of a batch as arrays, one span after the other.

    first:     [S + 1] int64, the spans' first rows, and the number of all rows
    start, committed: [S] int64, as of each Span
    nodes:     [S] int64, draft nodes
    table:     [S] int64, where the spans' page tables begin in pages, [P] int32
    parents:   [N] int32, of all draft nodes
    """

    first: NDArray[np.int64]
    start: NDArray[np.int64]
    committed: NDArray[np.int64]
    nodes: NDArray[np.int64]
    table: NDArray[np.int64]
    pages: NDArray[np.int32]
    parents: NDArray[np.int32]
    page_size: int

    def __len__(self) -> int:
        return len(self.start)

    @property
    def single(self) -> bool:
        """True if every span is one row."""
        return int(self.first[-1]) == len(self)

    @property
    def extent(self) -> Extent:
        """How many rows the spans have."""
        if self.single:
            return Extent.PLAIN
        return Extent.SHORT if int(np.diff(self.first).max()) <= SHORT else Extent.LONG

    @cached_property
    def span(self) -> NDArray[np.int64]:
        """The span of each row. [T]."""
        spans = np.arange(len(self))
        return spans if self.single else np.repeat(spans, np.diff(self.first))

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The place of each row among those of its span. [T]."""
        return np.arange(int(self.first[-1])) - self.first[self.span]

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """The place of each row's key among those of its session. [T]."""
        return self.start if self.single else self.start[self.span] + self.places

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """Where each row's key and value go. [T]."""
        pages = self.pages[self.table[self.span] + self.keys // self.page_size]
        slots: NDArray[np.int64] = pages.astype(np.int64) * self.page_size + self.keys % self.page_size
        return slots

    @classmethod
    def of(
        cls,
        start: Sequence[int] | NDArray[np.int64],
        committed: Sequence[int] | NDArray[np.int64],
        nodes: Sequence[int] | NDArray[np.int64],
        pages: NDArray[np.int32],
        parents: NDArray[np.int32],
        page_size: int,
    ) -> Layout:
        """Spans one after the other, each with as many pages as its keys need."""
        begin, own, hints = (np.asarray(column, np.int64) for column in (start, committed, nodes))
        rows = own + hints
        ends = np.cumsum(-(-(begin + rows) // page_size))
        assert len(pages) == (ends[-1] if len(ends) else 0), "the rows of a step have places in the cache"
        table = np.zeros(len(ends), np.int64)
        table[1:] = ends[:-1]
        first = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(rows, out=first[1:])
        return cls(first, begin, own, hints, table, pages, parents, page_size)

    def spans(self, positions: NDArray[np.int64]) -> list[Span]:
        """The spans as objects. positions: [rows], of the batch."""
        first, tables = self.first.tolist(), [*self.table.tolist(), len(self.pages)]
        behind = np.cumsum(self.nodes).tolist()
        return [
            Span(
                row, end - row, start, committed, self.pages[page:last_page], self.page_size,
                positions[row:end], self.parents[node - nodes : node],
            )
            for row, end, start, committed, page, last_page, node, nodes in zip(
                first[:-1], first[1:], self.start.tolist(), self.committed.tolist(), tables[:-1], tables[1:], behind,
                self.nodes.tolist(), strict=True,
            )
        ]  # fmt: skip

    def followed_by(self, rows: int, page: int) -> Layout:
        """With a span of committed rows behind, all of whose pages are this one."""
        pages = np.full(-(-rows // self.page_size), page, np.int32)
        return Layout.of(
            np.append(self.start, 0), np.append(self.committed, rows), np.append(self.nodes, 0),
            np.concatenate([self.pages, pages]), self.parents, self.page_size,
        )  # fmt: skip


def tree_mask(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which nodes each node sees: itself and its ancestors. parents: [N], before their children. Returns [N, N]."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents.tolist()):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask
