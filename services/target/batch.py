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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.paging.allocator import NULL_PAGE
from outrider.serving.scheduler import Chunk
from outrider.speculation.tree import EMPTY_SLICE, ROOT, TreeSlice
from services.target.upload import upload


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
class Capture:
    """Hidden states that a forward pass hands back besides the logits.

    layers: ascending; i is the residual stream entering decoder layer i, and the number of layers is what leaves the
            last one, before the final norm
    final:  also the state after the final norm, which the head multiplies; it comes last
    rows:   [F] int64, on the host, the rows of the batch whose states are wanted; None for all
    """

    layers: tuple[int, ...]
    final: bool
    rows: NDArray[np.int64] | None


@dataclass(frozen=True)
class Rows:
    """The rows of a batch on the host. ids, positions, slots: [T] int64; sampled: [R] int64."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    sampled: NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """T rows of S sessions, for a device.

    ids, positions, slots: [T] int64; a slot is where the row's key and value go
    sampled:               [R] int64, the rows whose logits are wanted. First the `drawn` ones after which a token is
                           drawn: each root and its nodes, session by session; then those that are only scored
    capture:               the hidden states that somebody asked for; None in most steps
    """

    spans: Sequence[Span]
    rows: Rows
    device: torch.device
    drawn: int
    capture: Capture | None = None
    placed: Sequence[Tensor] | None = None  # ids, positions, slots, sampled where they lie on the device already

    def __len__(self) -> int:
        return len(self.rows.ids)

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
        rows = self.rows
        if self.placed is not None:
            return self.placed
        return upload([rows.ids, rows.positions, rows.slots, rows.sampled], self.device)


def tree_mask(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which nodes each node sees: itself and its ancestors. parents: [N], before their children. Returns [N, N]."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents.tolist()):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask


def build(works: Sequence[Work], device: torch.device) -> Batch:
    """Lay out a step's work. The page tables must hold start + rows tokens of every session."""
    spans: list[Span] = []
    ids: list[NDArray[np.integer]] = []
    sampled: list[NDArray[np.int64]] = []
    scored: list[NDArray[np.int64]] = []
    first = 0
    for work in works:
        span = _span(work, first)
        spans.append(span)
        ids += [work.chunk.session.tokens[work.chunk.start : work.chunk.stop], work.draft.tokens]
        if work.chunk.last:
            sampled.append(np.arange(first + span.committed - 1, first + span.rows))
        if work.chunk.session.to_score and work.scored:
            scored.append(first - span.start + np.array(work.scored))
        first += span.rows
    flat_ids = np.concatenate(ids).astype(np.int64)
    positions = np.concatenate([span.positions for span in spans])
    slots = np.concatenate([span.slots_from(span.start) for span in spans])
    drawn = sum(map(len, sampled))
    rows = np.concatenate(sampled + scored) if sampled or scored else np.empty(0, np.int64)
    return Batch(spans, Rows(flat_ids, positions, slots, rows), device, drawn)


def pad(batch: Batch, size: int, page_size: int) -> Batch:
    """The batch with rows of padding up to a size, which attend to themselves in NULL_PAGE. Its own draws come first.

    As many rows are sampled as there are; those behind the batch's own are padding, or repeat row 0.
    """
    rows, more = batch.rows, size - len(batch)
    assert more >= 0, "a batch is never cut"
    sampled = np.zeros(size, np.int64)
    sampled[: len(rows.sampled)] = rows.sampled
    if not more:
        return replace(batch, rows=replace(rows, sampled=sampled))
    nothing, pages = np.zeros(more, np.int64), np.full(-(-more // page_size), NULL_PAGE, np.int32)
    span = Span(len(batch), more, 0, more, pages, page_size, nothing, EMPTY_SLICE.parents)
    padded = Rows(
        np.concatenate([rows.ids, nothing]),
        np.concatenate([rows.positions, nothing]),
        np.concatenate([rows.slots, NULL_PAGE * page_size + np.arange(more) % page_size]),
        sampled,
    )
    return replace(batch, spans=[*batch.spans, span], rows=padded)


def _span(work: Work, first: int) -> Span:
    chunk, draft = work.chunk, work.draft
    assert chunk.last or not len(draft), "only the last committed token has draft nodes below it"
    rows = len(chunk) + len(draft)
    positions = np.arange(chunk.start, chunk.start + rows)
    positions[len(chunk) :] = chunk.stop - 1 + draft.depths
    table = chunk.session.table
    assert chunk.start + rows <= table.capacity, "the rows of a step have places in the cache"
    pages = table.pages[: -(-(chunk.start + rows) // table.page_size)]
    return Span(first, rows, chunk.start, len(chunk), pages, table.page_size, positions, draft.parents)
