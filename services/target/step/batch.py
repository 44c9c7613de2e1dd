"""From sessions' work to flat rows: what one forward pass computes, for every session together.

A session brings a *span* of rows: committed tokens that are not in the cache yet (a prompt chunk, or the root alone),
and behind them the draft nodes to verify, which hang below the last committed token (layout.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.paging.allocator import NULL_PAGE
from outrider.serving.scheduler import Chunk
from outrider.speculation.tree import EMPTY_SLICE, TreeSlice
from services.target.step.layout import Layout, Span
from services.target.step.programs import StepProgram
from services.target.step.upload import upload


class WeightHandle(Protocol):
    """A weight that compiled kernels hold. handle: its address."""

    handle: int


@dataclass(frozen=True)
class SessionWork:
    """What a step computes of one session: a chunk of committed tokens, and draft tokens if the chunk is its last."""

    chunk: Chunk
    draft: TreeSlice = EMPTY_SLICE

    @property
    def scored(self) -> range:
        """Positions of the chunk's tokens whose logits are wanted although nothing is drawn after them."""
        session = self.chunk.session
        return range(max(self.chunk.start, session.scored), min(self.chunk.stop, session.to_score))


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
    fusion: tuple[WeightHandle, Tensor | None] | None = None


@dataclass(frozen=True)
class SamplingPlan:
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
    program:               what may follow within the same call; None for a single step
    roots:                 ids that are not known on the host
    """

    layout: Layout
    rows: Rows
    device: torch.device
    drawn: int
    capture: Capture | None = None
    draws: SamplingPlan | None = None
    program: StepProgram | None = None
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


def build(
    works: Sequence[SessionWork],
    device: torch.device,
    capture: Capture | None = None,
    draws: SamplingPlan | None = None,
    program: StepProgram | None = None,
    ahead: int = 0,
) -> Batch:
    """Lay out a step's work. The page tables must hold start + rows tokens of every session, and the program's
    extra slots.

    ahead: how many places behind its own the token of a row stands; the chunks end so many tokens earlier

    Numbers gather in lists and become arrays at the end: a step is laid out on caches that the model's weights have
    swept, where the first touch of each of NumPy's functions costs more than some hundred numbers in Python.
    """
    page_size = works[0].chunk.session.table.page_size
    more = program.extra_slots if program else 0
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
        needed = -(-(stop + hints + more) // page_size)
        starts.append(start)
        committed.append(own)
        nodes.append(hints)
        tables.append(page)
        ids += session.tokens[start + ahead : stop + ahead].tolist()
        positions += range(start, stop)
        pages.append(session.table.pages[:needed])
        if hints:
            assert chunk.last, "only the last committed token has draft nodes below it"
            ids += draft.tokens.tolist()
            positions += [stop - 1 + depth for depth in draft.depths.tolist()]
            parents.append(draft.parents)
        if stop + ahead == session.length:
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
    return Batch(layout, rows, device, drawn, capture, draws, program)


def _joined(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _scored(work: SessionWork, first: int) -> Sequence[int]:
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
