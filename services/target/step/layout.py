"""The layout of a batch: one span of tokens for each session, as objects and as arrays.

    slot position   0 ........ start-1 | start ...... start+committed-1 | ...... start+rows-1
                    in the cache       | committed tokens (last = root) | draft tokens (nodes), in slice order
    attends to      -                  | all before it, itself          | all committed, its ancestors, itself

The slot position of a node follows from its index in the span. Its *logical* position, which RoPE and windows use, is
the root's plus its depth, so that siblings share one.
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
"""Most tokens of a short span: a root and a few nodes."""


class Extent(IntEnum):
    """Size class of a batch's spans. Kernels have cheaper variants for the smaller ones."""

    PLAIN = 1
    """One token each, which is committed."""
    SHORT = 2
    """At most SHORT tokens."""
    LONG = 3
    """Any number."""


@dataclass(frozen=True)
class Span:
    """The tokens first .. first + rows - 1 of a batch, all of one session.

    start:     tokens of the session that are in the cache already
    committed: committed tokens of the span; the others are draft tokens, the nodes
    pages:     [pages] int32, the pages of the session's keys in order, cached ones and the span's own; page_size in
               tokens. A view of the session's page table, valid during the step.
    positions: [rows] int64, logical positions
    parents:   [nodes] int32, the index of each node's parent among the nodes, or ROOT
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
    def kv_tokens(self) -> int:
        """Context length of the session with the span, nodes included, in tokens."""
        return self.start + self.rows

    @property
    def nodes(self) -> int:
        """Draft tokens."""
        return self.rows - self.committed

    @property
    def is_padding(self) -> bool:
        """True for padding, which writes NULL_PAGE and whose results are not read."""
        return len(self.pages) > 0 and int(self.pages[0]) == NULL_PAGE

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """The slots of the session's keys in order, cached ones and the span's own. [kv_tokens] int64."""
        return self.slots_from(0)

    @cached_property
    def tree_mask(self) -> NDArray[np.bool_]:
        """Which nodes each node attends to: itself and its ancestors. [nodes, nodes] bool."""
        return tree_mask(self.parents)

    def slots_from(self, first: int) -> NDArray[np.int64]:
        """Slots of the keys first, first + 1, ... [kv_tokens - first] int64."""
        keys = np.arange(first, self.kv_tokens)
        return self.pages[keys // self.page_size].astype(np.int64) * self.page_size + keys % self.page_size


@dataclass(frozen=True)
class Layout:
    """The S spans of a batch as arrays, one span after the other.

    first:     [S + 1] int64, the index of each span's first token, and the number of all tokens
    start, committed, nodes: [S] int64, as of each Span
    table:     [S] int64, the index in `pages`, [P] int32, where each span's page table begins
    parents:   [N] int32, of the nodes of all spans
    slack:     [S] int64, tokens by which each span may begin later on the device; None for none
    """

    first: NDArray[np.int64]
    start: NDArray[np.int64]
    committed: NDArray[np.int64]
    nodes: NDArray[np.int64]
    table: NDArray[np.int64]
    pages: NDArray[np.int32]
    parents: NDArray[np.int32]
    page_size: int
    slack: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.start)

    @property
    def single(self) -> bool:
        """True if every span is one token."""
        return int(self.first[-1]) == len(self)

    @property
    def extent(self) -> Extent:
        """Size class of the spans."""
        if self.single:
            return Extent.PLAIN
        return Extent.SHORT if int(np.diff(self.first).max()) <= SHORT else Extent.LONG

    @cached_property
    def span(self) -> NDArray[np.int64]:
        """The span of each token. [T]."""
        spans = np.arange(len(self))
        return spans if self.single else np.repeat(spans, np.diff(self.first))

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """The index of each token in its span. [T]."""
        return np.arange(int(self.first[-1])) - self.first[self.span]

    @cached_property
    def slot_positions(self) -> NDArray[np.int64]:
        """The index of each token's key among those of its session. [T]."""
        return self.start if self.single else self.start[self.span] + self.offsets

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """Where each token's key and value go. [T]."""
        positions = self.slot_positions
        pages = self.pages[self.table[self.span] + positions // self.page_size].astype(np.int64)
        slots: NDArray[np.int64] = pages * self.page_size + positions % self.page_size
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
        slack: NDArray[np.int64] | None = None,
    ) -> Layout:
        """Spans one after the other, each with as many pages as its keys need."""
        begin, fixed, drafted = (np.asarray(column, np.int64) for column in (start, committed, nodes))
        rows = fixed + drafted
        ends = np.cumsum(-(-(begin + rows + (0 if slack is None else slack)) // page_size))
        assert len(pages) == (ends[-1] if len(ends) else 0), "a page table lacks pages for the tokens of the step"
        table = np.zeros(len(ends), np.int64)
        table[1:] = ends[:-1]
        first = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(rows, out=first[1:])
        return cls(first, begin, fixed, drafted, table, pages, parents, page_size, slack)

    def spans(self, positions: NDArray[np.int64]) -> list[Span]:
        """The spans as objects. positions: [T], logical positions of the batch."""
        first, tables = self.first.tolist(), [*self.table.tolist(), len(self.pages)]
        ends = np.cumsum(self.nodes).tolist()
        return [
            Span(
                row, end - row, start, committed, self.pages[page:last_page], self.page_size,
                positions[row:end], self.parents[node - nodes : node],
            )
            for row, end, start, committed, page, last_page, node, nodes in zip(
                first[:-1], first[1:], self.start.tolist(), self.committed.tolist(), tables[:-1], tables[1:], ends,
                self.nodes.tolist(), strict=True,
            )
        ]  # fmt: skip

    def followed_by(self, rows: int, page: int) -> Layout:
        """With one more span, of committed tokens, all of whose pages are this one."""
        pages = np.full(-(-rows // self.page_size), page, np.int32)
        return Layout.of(
            np.append(self.start, 0), np.append(self.committed, rows), np.append(self.nodes, 0),
            np.concatenate([self.pages, pages]), self.parents, self.page_size,
            None if self.slack is None else np.append(self.slack, 0),
        )  # fmt: skip


def tree_mask(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which nodes each node attends to: itself and its ancestors. parents: [N], parents first. Returns [N, N]."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents.tolist()):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask
