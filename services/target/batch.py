"""From sessions' work to flat rows: what one forward pass computes, for every session together.

A session brings a *span* of rows: committed tokens that are not in the cache yet (a prompt chunk, or the root alone),
and behind them the draft nodes to verify, which hang below the last committed token.

    slot position   0 ........ start-1 | start .... start+committed-1 | ...... start+rows-1
                    in the cache       | committed rows (last = root) | draft nodes, in slice order
    sees            -                  | all before it, itself        | all committed, its ancestors, itself

A node's slot position is its place in the span; its *logical* position, which RoPE and windows use, is the root's plus
its depth. Siblings share a logical position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.paging.allocator import NULL_PAGE
from outrider.serving.scheduler import Chunk
from outrider.speculation.tree import EMPTY_SLICE, ROOT, TreeSlice
from services.target.upload import upload

if TYPE_CHECKING:
    from services.target.kernels.cpu.weights import PackedWeight


@dataclass(frozen=True)
class Work:
    """What one session wants of a step: a chunk of committed tokens, and draft nodes if the chunk is its last."""

    chunk: Chunk
    draft: TreeSlice = EMPTY_SLICE

    @property
    def scored(self) -> range:
        """Positions of the chunk's tokens whose logits are wanted although nothing is drawn after them."""
        session = self.chunk.session
        return range(max(self.chunk.start, session.scored), min(self.chunk.stop, session.to_score))


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
        return pages.astype(np.int64) * self.page_size + self.keys % self.page_size

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


@dataclass(frozen=True)
class Capture:
    """Hidden states that a forward pass hands back besides the logits.

    layers: ascending; i is the residual stream entering decoder layer i, and the number of layers is what leaves the
            last one, before the final norm
    final:  also the state after the final norm, which the head multiplies; it comes last
    rows:   [F] int64, on the host, the rows of the batch whose states are wanted; None for all
    fusion: a layer, weight and bias (float32), whose product with the states is wanted in their place; of compiled
            programs alone
    """

    layers: tuple[int, ...]
    final: bool
    rows: NDArray[np.int64] | None
    fusion: tuple[PackedWeight, Tensor | None] | None = None


@dataclass(frozen=True)
class DrawPlan:
    """How tokens are drawn after a batch's drawn rows.

    sessions:  what each asked for, packed as compiled kernels read it, one after the other
    counts:    [S] int64 ("q"), rows of each
    positions: [R] int64 ("q"), absolute positions of the drawn tokens
    """

    sessions: bytes
    counts: array[int]
    positions: array[int]


@dataclass(frozen=True)
class Rows:
    """The rows of a batch on the host. ids, positions: [T] int64; sampled: [R] int64."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    sampled: NDArray[np.int64]


@dataclass(frozen=True)
class Roots:
    """Ids that only the device knows, as it is still drawing them. rows, sources: [n] int64, on the host.

    The id of each row is the token that is drawn at its place in `tokens`, [R] int64; where none can be, it is 0.
    """

    rows: NDArray[np.int64]
    sources: NDArray[np.int64]
    tokens: Tensor

    def put(self, ids: Tensor) -> None:
        """Write them where the ids lie, [T] int64."""
        runs = _run(self.rows), _run(self.sources)
        if runs[0] and runs[1]:  # as in most steps: nothing else must be told to the device
            ids[runs[0]] = self.tokens[runs[1]].clamp(min=0)
            return
        rows, sources = upload([self.rows, self.sources], ids.device)
        ids.index_copy_(0, rows, self.tokens.index_select(0, sources).clamp(min=0))


def _run(numbers: NDArray[np.int64]) -> slice | None:
    """Numbers that follow one another, as a slice."""
    first, count = int(numbers[0]), len(numbers)
    return slice(first, first + count) if (numbers == np.arange(first, first + count)).all() else None


@dataclass(frozen=True)
class Batch:
    """T rows of S sessions, for a device.

    layout:                the spans of rows that belong to one session each
    ids, positions, slots: [T] int64; a slot is where the row's key and value go
    sampled:               [R] int64, the rows whose logits are wanted. First the `drawn` ones after which a token is
                           drawn: each root and its nodes, session by session; then those that are only scored
    capture:               the hidden states that somebody asked for; None in most steps
    draws:                 what is to be drawn from the logits as they are, by runners that can; None for none
    roots:                 ids that are not known on the host
    """

    layout: Layout
    rows: Rows
    device: torch.device
    drawn: int
    capture: Capture | None = None
    draws: DrawPlan | None = None
    roots: Roots | None = None
    placed: Sequence[Tensor] | None = None  # ids, positions, slots, sampled where they lie on the device already

    def __len__(self) -> int:
        return len(self.rows.ids)

    @cached_property
    def spans(self) -> Sequence[Span]:
        """The layout as objects, for those who go through it span by span."""
        return self.layout.spans(self.rows.positions)

    @property
    def inputs(self) -> list[NDArray[np.int64]]:
        """ids, positions, slots and sampled, on the host."""
        return [self.rows.ids, self.rows.positions, self.layout.slots, self.rows.sampled]

    @property
    def ids(self) -> Tensor:
        """Token ids."""
        return self._tensors[0]

    @property
    def positions(self) -> Tensor:
        """Logical positions."""
        return self._tensors[1]

    @property
    def slots(self) -> Tensor:
        """Where keys and values go."""
        return self._tensors[2]

    @property
    def sampled(self) -> Tensor:
        """Rows after which a token is drawn."""
        return self._tensors[3]

    @cached_property
    def _tensors(self) -> Sequence[Tensor]:
        if self.placed is not None:
            return self.placed
        tensors = upload(self.inputs, self.device)
        if self.roots is not None:
            self.roots.put(tensors[0])
        return tensors


def tree_mask(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which nodes each node sees: itself and its ancestors. parents: [N], before their children. Returns [N, N]."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents.tolist()):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask


def build(
    works: Sequence[Work], device: torch.device, capture: Capture | None = None, draws: DrawPlan | None = None
) -> Batch:
    """Lay out a step's work. The page tables must hold start + rows tokens of every session.

    Numbers gather in lists and become arrays at the end: a step is laid out on caches that the model's weights have
    swept, where the first touch of each of NumPy's functions costs more than some hundred numbers in Python.
    """
    page_size = works[0].chunk.session.table.page_size
    starts, committed, nodes, tables, firsts = [], [], [], [], [0]  # of each span
    ids: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    pages: list[NDArray[np.int32]] = []
    parents: list[NDArray[np.int32]] = []
    row = page = 0
    for work in works:
        chunk, draft = work.chunk, work.draft
        session, start, stop, hints = chunk.session, chunk.start, chunk.stop, len(draft.tokens)
        own = stop - start
        needed = -(-(stop + hints) // page_size)
        starts.append(start)
        committed.append(own)
        nodes.append(hints)
        tables.append(page)
        ids += session.tokens[start:stop].tolist()
        positions += range(start, stop)
        pages.append(session.table.pages[:needed])
        if hints:
            assert chunk.last, "only the last committed token has draft nodes below it"
            ids += draft.tokens.tolist()
            positions += [stop - 1 + depth for depth in draft.depths.tolist()]
            parents.append(draft.parents)
        if chunk.last:
            sampled += range(row + own - 1, row + own + hints)
        row += own + hints
        page += needed
        firsts.append(row)
    count, drawn = len(works), len(sampled)
    if any(work.chunk.session.to_score for work in works):
        for work, first in zip(works, firsts, strict=False):
            sampled += _scored(work, first)
    words = np.frombuffer(
        array("q", [*firsts, *starts, *committed, *nodes, *tables, *ids, *positions, *sampled]), np.int64
    )
    columns = words[count + 1 : 5 * count + 1].reshape(4, count)
    layout = Layout(
        words[: count + 1], columns[0], columns[1], columns[2], columns[3], _joined(pages),
        _joined(parents) if parents else EMPTY_SLICE.parents, page_size,
    )  # fmt: skip
    assert len(layout.pages) == page, "the rows of a step have places in the cache"
    behind = 5 * count + 1
    rows = Rows(words[behind : behind + row], words[behind + row : behind + 2 * row], words[behind + 2 * row :])
    return Batch(layout, rows, device, drawn, capture, draws)


def _joined(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _scored(work: Work, first: int) -> Sequence[int]:
    """Rows of a chunk that are only scored. first: that of its span."""
    away = first - work.chunk.start
    return range(away + work.scored.start, away + work.scored.stop) if work.chunk.session.to_score else ()


def pad(batch: Batch, size: int) -> Batch:
    """The batch with rows of padding up to a size, which attend to themselves in NULL_PAGE. Its own draws come first.

    As many rows are sampled as there are; those behind the batch's own are padding, or repeat row 0.
    """
    rows, more = batch.rows, size - len(batch)
    assert more >= 0, "a batch is never cut"
    sampled = np.zeros(size, np.int64)
    sampled[: len(rows.sampled)] = rows.sampled
    if not more:
        return replace(batch, rows=replace(rows, sampled=sampled))
    nothing = np.zeros(more, np.int64)
    padded = Rows(
        np.concatenate([rows.ids, nothing]),
        np.concatenate([rows.positions, nothing]),
        sampled,
    )
    return replace(batch, layout=batch.layout.followed_by(more, NULL_PAGE), rows=padded)
