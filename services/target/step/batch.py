"""The batch of a step: the tokens that one forward pass computes, of all sessions together.

Each session has a *span* of tokens: committed tokens that are not in the cache yet (a prompt chunk, or the root alone),
followed by the draft tokens to verify, which hang below the last committed token (layout.py).
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
from services.target.step.prepared import PreparedSpans
from services.target.step.programs import StepProgram
from services.target.step.upload import upload


class WeightHandle(Protocol):
    """A weight that compiled kernels hold."""

    @property
    def handle(self) -> int:
        """Its address."""
        ...


@dataclass(frozen=True)
class SessionWork:
    """What a step computes of one session: a chunk of committed tokens, and draft tokens if the chunk is its last.

    reach: most draft tokens that the step in flight may accept, which the device adds to the chunk's positions before
           it chooses the draft tokens, so that `draft` holds room for them alone; None if all is known
    """

    chunk: Chunk
    draft: TreeSlice = EMPTY_SLICE
    reach: int | None = None

    @property
    def scored(self) -> range:
        """Positions of the chunk's tokens that are scored: their logits are wanted, but no token is sampled."""
        session = self.chunk.session
        return range(max(self.chunk.start, session.scores.computed), min(self.chunk.stop, session.scores.needed))


@dataclass(frozen=True)
class Capture:
    """Hidden states that a forward pass returns besides the logits.

    layers: ascending; i is the residual stream that enters decoder layer i, and the number of layers is the output of
            the last one, before the final norm
    final:  also the state after the final norm, which the language model head reads; it comes last
    rows:   [F] int64, on the host, the tokens of the batch whose states are wanted; None for all
    fusion: weight and bias (float32) of a linear layer, whose output is returned in place of the states; only compiled
            programs apply it
    """

    layers: tuple[int, ...]
    final: bool
    rows: NDArray[np.int64] | None
    fusion: tuple[WeightHandle, Tensor | None] | None = None


@dataclass(frozen=True)
class SamplingPlan:
    """How the tokens of a batch are sampled. S sessions, R samples.

    sessions:  sampling parameters of each session, packed for compiled kernels, one after the other
    counts:    [S] int64 ("q"), samples of each session
    positions: [R] int64 ("q"), absolute positions of the samples
    """

    sessions: bytes
    counts: array[int]
    positions: array[int]


@dataclass(frozen=True)
class TokenArrays:
    """The tokens of a batch on the host. ids, positions: [T] int64; sampled: [R] int64."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    sampled: NDArray[np.int64]


@dataclass(frozen=True)
class DeferredRoots:
    """Roots whose ids are known only on the device, because the step in flight samples them.

    rows, sources: [n] int64, on the host. The id of token rows[i] of the batch is tokens[sources[i]], or 0 where no
    token could be sampled. tokens: [R] int64, samples of the step in flight
    """

    rows: NDArray[np.int64]
    sources: NDArray[np.int64]
    tokens: Tensor

    def put(self, ids: Tensor) -> None:
        """Write the roots into the ids of a batch, [T] int64, in place."""
        runs = consecutive(self.rows), consecutive(self.sources)
        if runs[0] and runs[1]:  # in most steps: no indices must be uploaded
            ids[runs[0]] = self.tokens[runs[1]].clamp(min=0)
            return
        rows, sources = upload([self.rows, self.sources], ids.device)
        ids.index_copy_(0, rows, self.tokens.index_select(0, sources).clamp(min=0))


def consecutive(numbers: NDArray[np.int64]) -> slice | None:
    """Consecutive numbers, at least one, as a slice; None for others."""
    first, count = int(numbers[0]), len(numbers)
    return slice(first, first + count) if (numbers == np.arange(first, first + count)).all() else None


@dataclass(frozen=True)
class Batch:
    """T tokens of S sessions, for a device.

    layout:                the spans of tokens, one for each session
    ids, positions, slots: [T] int64; a slot is where the token's key and value go
    sampled:               [R] int64, the tokens whose logits are wanted. The first `sample_count` are those after which
                           a token is sampled: each root and its draft tokens, session by session. The others are scored
    capture:               hidden states that are requested; None in most steps
    sampling:              what runners that can sample from unadjusted logits; None for none
    program:               what may follow within the same call; None for a single step
    roots:                 roots whose ids are not known on the host
    prepared:              spans whose tokens, positions and slots are not known on the host
    """

    layout: Layout
    rows: TokenArrays
    device: torch.device
    sample_count: int
    capture: Capture | None = None
    sampling: SamplingPlan | None = None
    program: StepProgram | None = None
    roots: DeferredRoots | None = None
    prepared: PreparedSpans | None = None
    placed: Sequence[Tensor] | None = None  # ids, positions, slots, sampled, if they are on the device already

    def __len__(self) -> int:
        return len(self.rows.ids)

    @cached_property
    def spans(self) -> Sequence[Span]:
        """The layout as objects, for loops over spans."""
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
        """Tokens whose logits are wanted."""
        return self._tensors[3]

    @cached_property
    def _tensors(self) -> Sequence[Tensor]:
        if self.placed is not None:
            return self.placed
        tensors = upload(self.inputs, self.device)
        if self.roots is not None:
            self.roots.put(tensors[0])
        if self.prepared is not None:
            self.prepared.put(*tensors[:3])
        return tensors

    def settled(self, prepared: PreparedSpans) -> Batch:
        """The batch with its prepared spans on the host: for a CPU, where a launch has ended when it returns."""
        layout = self.layout
        start, parents = layout.start.copy(), layout.parents.copy()
        slots = torch.zeros(len(self), dtype=torch.int64)
        prepared.put(torch.from_numpy(self.rows.ids), torch.from_numpy(self.rows.positions), slots)
        prepared.shift(torch.from_numpy(layout.first[:-1]), torch.from_numpy(start))
        prepared.parents(torch.from_numpy(parents))
        return replace(self, layout=replace(layout, start=start, parents=parents, slack=None))


def build(
    works: Sequence[SessionWork],
    device: torch.device,
    capture: Capture | None = None,
    sampling: SamplingPlan | None = None,
    program: StepProgram | None = None,
    ahead: int = 0,
) -> Batch:
    """The batch of a step's work. Page tables must have room for each session's tokens and the program's extra slots.

    ahead: offset between a token and its cache position: the token at position + ahead is computed at a position, and
    the chunks end that many tokens before the text. 1 for EAGLE heads

    Numbers are collected in lists and converted at the end: the model's weights have evicted the CPU caches, so that
    the first call of each NumPy function costs more than some hundred numbers in Python.
    """
    page_size = works[0].chunk.session.table.page_size
    more = program.extra_slots if program else 0
    starts, committed, nodes, tables, reaches, firsts = [], [], [], [], [], [0]  # of each span
    ids: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    pages: list[NDArray[np.int32]] = []
    parents: list[NDArray[np.int32]] = []
    row = page = 0
    for work in works:
        chunk, draft = work.chunk, work.draft
        session, start, stop, drafted = chunk.session, chunk.start, chunk.stop, len(draft.tokens)
        length = stop - start
        reach = work.reach or 0
        needed = -(-(stop + reach + drafted + more) // page_size)
        starts.append(start)
        committed.append(length)
        nodes.append(drafted)
        tables.append(page)
        reaches.append(reach)
        ids += session.tokens[start + ahead : stop + ahead].tolist()
        positions += range(start, stop)
        pages.append(session.table.pages[:needed])
        if drafted:
            assert chunk.last, "draft tokens hang below the last committed token only"
            ids += draft.tokens.tolist()
            positions += [stop - 1 + depth for depth in draft.depths.tolist()]
            parents.append(draft.parents)
        if stop + ahead == session.length:
            sampled += range(row + length - 1, row + length + drafted)
        row += length + drafted
        page += needed
        firsts.append(row)
    count, sample_count = len(works), len(sampled)
    if any(work.chunk.session.scores.needed for work in works):
        for work, first in zip(works, firsts, strict=False):
            sampled += _scored(work, first)
    words = np.frombuffer(
        array("q", [*firsts, *starts, *committed, *nodes, *tables, *ids, *positions, *sampled]), np.int64
    )
    columns = words[count + 1 : 5 * count + 1].reshape(4, count)
    layout = Layout(
        words[: count + 1], columns[0], columns[1], columns[2], columns[3], _joined(pages),
        _joined(parents) if parents else EMPTY_SLICE.parents, page_size,
        np.array(reaches, np.int64) if any(reaches) else None,
    )  # fmt: skip
    assert len(layout.pages) == page, "a page table lacks pages for the tokens of the step"
    first = 5 * count + 1
    tokens = TokenArrays(words[first : first + row], words[first + row : first + 2 * row], words[first + 2 * row :])
    return Batch(layout, tokens, device, sample_count, capture, sampling, program)


def _joined(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _scored(work: SessionWork, first: int) -> Sequence[int]:
    """Tokens of a chunk that are scored, as indices into the batch. first: of its span."""
    offset = first - work.chunk.start
    return range(offset + work.scored.start, offset + work.scored.stop) if work.chunk.session.scores.needed else ()


def pad(batch: Batch, size: int) -> Batch:
    """The batch, padded to a number of tokens. Padding attends to itself in NULL_PAGE; its own samples come first.

    `sampled` has as many entries as the batch has tokens; those behind the batch's own are 0.
    """
    rows, more = batch.rows, size - len(batch)
    assert more >= 0, "a batch is larger than its padded size"
    sampled = np.zeros(size, np.int64)
    sampled[: len(rows.sampled)] = rows.sampled
    if not more:
        return replace(batch, rows=replace(rows, sampled=sampled))
    nothing = np.zeros(more, np.int64)
    padded = TokenArrays(
        np.concatenate([rows.ids, nothing]),
        np.concatenate([rows.positions, nothing]),
        sampled,
    )
    return replace(batch, layout=batch.layout.followed_by(more, NULL_PAGE), rows=padded)
