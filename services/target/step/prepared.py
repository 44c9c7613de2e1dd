"""A step that the device prepares: which draft tokens it verifies follows from samples that the host has not read.

    in flight   step n, whose samples lie on the device
    tables      the trees below the roots of n, as the host knows them when it launches n + 1
    walk        along the samples of n: accepted nodes, the bonus token, and the nodes that survive below it
    spans       rows of n + 1: the bonus token as root, then the best surviving nodes of each session, then filler

The host fixes the number of rows of each session, and pages for the longest accepted path. Everything else follows on
the device by integer operations of fixed shapes, so the host gets the same numbers when it repeats them later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.tree import ROOT, TreeSlice
from services.target.step.upload import upload

MAX_NODES = 64
"""Nodes of a session's table, as many as a word has bits; also the entry that stands for its root."""
MAX_DRAFT = 31
"""Most draft tokens of a session in a prepared step: the bits of a word of the tree mask, but the sign."""
NO_TOKEN = -3  # of unused entries and filler; no sample equals it


@dataclass(frozen=True)
class TreeTables:
    """The trees of S sessions below the roots of the step in flight. On the host.

    nodes:    [5, S, MAX_NODES] int64: token; parent, an entry of the table or MAX_NODES for the root; depth, from 1;
              row among the samples of the step in flight, or -1 for a node that it does not verify; ancestors and the
              node itself, as bits. Parents first, verified nodes first, then the others from the best to the worst
    sessions: [4, S] int64: row of the root among the samples; position of the root; last position that a node may
              have; draft tokens that the prepared step has room for
    scores:   [S, MAX_NODES] float64, path scores below the root of the step in flight
    """

    nodes: NDArray[np.int64]
    sessions: NDArray[np.int64]
    scores: NDArray[np.float64]

    @property
    def width(self) -> int:
        """Most draft tokens of a session in the prepared step."""
        return int(self.sessions[3].max(initial=0))


class Spans(NamedTuple):
    """Rows of the prepared step, of S sessions with up to K draft tokens each. All int64.

    bonus:    [S], the roots' tokens; negative where none could be sampled
    accepted: [S], draft tokens of the step in flight
    position: [S], of the roots
    nodes:    [S, K], entries of the table, best first; MAX_NODES for filler
    tokens:   [S, K], NO_TOKEN for filler
    parents:  [S, K], an earlier draft token of the session; K for the root and of filler
    depths:   [S, K], from 1; 0 for filler
    """

    bonus: Tensor
    accepted: Tensor
    position: Tensor
    nodes: Tensor
    tokens: Tensor
    parents: Tensor
    depths: Tensor


def walk(samples: Tensor, nodes: Tensor, sessions: Tensor, width: int) -> Spans:
    """Walk the trees along the samples of the step in flight, and choose the draft tokens of the prepared step.

    samples: [R] int64; nodes, sessions: as of TreeTables, on the samples' device; width: K
    """
    token, parent, depth, row, ancestors = nodes.unbind(0)
    root_row, root_position, last, room = sessions.unbind(0)
    count = len(root_row)
    none = parent.new_full((count, 1), MAX_NODES)
    entries = torch.arange(MAX_NODES, device=samples.device).expand(count, -1)
    parent_row = torch.cat([row, root_row[:, None]], 1).gather(1, parent)
    judged = parent_row >= 0  # a token was sampled after the parent
    wrong = judged & (samples[parent_row.clamp(min=0)] != token)
    # Nodes that agree with the samples, and so do their ancestors: accepted, or the bonus token, or below it.
    good = (ancestors & torch.where(wrong, 1 << entries, 0).sum(1, keepdim=True)) == 0
    accepted, deepest = torch.where(good & (row >= 0), depth, 0).max(1)
    end = torch.where(accepted > 0, row.gather(1, deepest[:, None])[:, 0], root_row)
    position = root_position + accepted + 1
    alive = good & ~judged & (root_position[:, None] + depth <= last[:, None])
    rank = alive.cumsum(1) - 1
    place = torch.where(alive & (rank < room[:, None]), rank, width)
    chosen = parent.new_full((count, width + 1), MAX_NODES).scatter_(1, place, entries)[:, :width]
    token, depth, parent = (
        torch.cat([column, torch.full_like(none, filler)], 1).gather(1, chosen)
        for column, filler in ((token, NO_TOKEN), (depth, 0), (parent, MAX_NODES))
    )
    place = torch.cat([place, torch.full_like(none, width)], 1)
    depth = torch.where(chosen < MAX_NODES, depth - accepted[:, None] - 1, 0)
    return Spans(samples[end], accepted, position, chosen, token, place.gather(1, parent), depth)


class Resolved(NamedTuple):
    """What a session's span turned out to be, on the host. bonus, accepted, position: as of Spans."""

    bonus: int
    accepted: int
    position: int
    draft: TreeSlice


def resolve(samples: NDArray[np.int64], tables: TreeTables) -> list[Resolved]:
    """Repeat the walk on the host, once the samples have arrived there. Returns each session's span."""
    nodes, sessions = torch.from_numpy(tables.nodes), torch.from_numpy(tables.sessions)
    spans = walk(torch.from_numpy(samples), nodes, sessions, tables.width)
    entries, tokens, parent_places, depths = (column.numpy() for column in spans[3:])
    found: list[Resolved] = []
    for one, (bonus, accepted, position) in enumerate(zip(*(c.tolist() for c in spans[:3]), strict=True)):
        chosen = entries[one]
        chosen = chosen[chosen < MAX_NODES]
        count = len(chosen)
        scores = tables.scores[one, chosen]
        if count:  # below the bonus token, which is the parent of the first of them
            scores = scores - tables.scores[one, tables.nodes[1, one, chosen[0]]]
        parents = parent_places[one, :count]
        draft = TreeSlice(
            tokens[one, :count].astype(np.uint32),
            np.where(parents == tables.width, ROOT, parents).astype(np.int32),
            depths[one, :count].astype(np.int32),
            scores.astype(np.float32),
        )
        found.append(Resolved(bonus, accepted, position, draft))
    return found


@dataclass(frozen=True)
class RowMaps:
    """Where the spans stand in the batch of the prepared step. On the host; all int64.

    firsts: [3, S], of each span: its first row in the batch, its first sampled row, and the index of its first draft
            token among those of the batch
    rows:   [3, n], for each row of a span: its cell, session * (K + 1) + place; its row in the batch; its sampled row
    nodes:  [2, m], for each draft token: its cell, session * K + place; its index among the draft tokens of the batch
    pages:  [S, P + 1], index of the first page, and pages from there on that the spans may reach
    keys:   [S, N, 2], noise keys of the positions behind the root of the step in flight, from the second one on; no
            sessions if all are greedy
    """

    firsts: NDArray[np.int64]
    rows: NDArray[np.int64]
    nodes: NDArray[np.int64]
    pages: NDArray[np.int64]
    keys: NDArray[np.int64]


class PreparedSpans:
    """The spans of a prepared step on the device, and their places in its batch.

    taken: samples of the step in flight. tables, maps: of the host. First of all, `put` must be called, once the
    samples are being computed.
    """

    def __init__(self, samples: Tensor, tables: TreeTables, maps: RowMaps, page_size: int) -> None:
        """samples: [R] int64, of the step in flight, on its device. Waits for nothing."""
        self.tables, self.maps, self.page_size, self.taken = tables, maps, page_size, samples
        arrays = [tables.nodes, tables.sessions, maps.firsts, maps.rows, maps.nodes, maps.pages, maps.keys]
        placed = upload(arrays, samples.device)
        self._tree, self._sessions, self._firsts, self._rows, self._nodes, self._pages, self._keys = placed

    def __len__(self) -> int:
        return len(self.tables.scores)

    @property
    def width(self) -> int:
        """Most draft tokens of a session."""
        return self.tables.width

    def put(self, ids: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Choose the draft tokens, and write the spans into the inputs of the batch, [T] int64 each, in place."""
        self.spans = spans = walk(self.taken, self._tree, self._sessions, self.width)
        root = torch.zeros_like(spans.bonus)[:, None]
        self._tokens = torch.cat([spans.bonus[:, None], spans.tokens], 1)  # [S, K + 1] each
        self._depths = torch.cat([root, spans.depths], 1)
        self._slots = self._slots_of(spans.position)
        self._moved = spans.accepted[:, None]
        rows = self._rows[1]
        ids.index_copy_(0, rows, self._by_row(self._tokens.clamp(min=0)))
        positions.index_copy_(0, rows, self._by_row(spans.position[:, None] + self._depths))
        slots.index_copy_(0, rows, self._by_row(self._slots))

    def _slots_of(self, position: Tensor) -> Tensor:
        """Slots of the rows of each span, which lie one after the other. [S, K + 1]."""
        places = position[:, None] + torch.arange(self.width + 1, device=position.device)
        pages = self._pages[:, 1:].gather(1, places // self.page_size - self._pages[:, :1])
        return pages * self.page_size + places % self.page_size

    def _by_row(self, cells: Tensor) -> Tensor:
        """Numbers of cells, [S, K + 1], row by row of the spans. [n]."""
        return cells.reshape(-1).index_select(0, self._rows[0])

    def shift(self, firsts: Tensor, starts: Tensor) -> None:
        """Move the beginnings of spans to where they are, in place: they were laid out behind no accepted token.

        firsts: [n] int, a row of the batch for each; starts: [n, ...] int, positions in the session
        """
        size = int(self.maps.rows[1].max()) + 2  # further rows are not the spans'
        moved = self._moved.new_zeros(size)
        moved.index_copy_(0, self._rows[1], self._by_row(self._moved.expand(-1, self.width + 1)))
        by = moved.index_select(0, firsts.to(torch.int64).clamp(max=size - 1))
        starts += by.view(-1, *[1] * (starts.dim() - 1)).to(starts.dtype)

    def parents(self, parents: Tensor) -> None:
        """Write the parents of the spans' draft tokens among those of the batch, [N] int32, in place."""
        if self.width:
            own = torch.where(self.spans.parents == self.width, ROOT, self.spans.parents)
            parents.index_copy_(0, self._nodes[1], own.reshape(-1).index_select(0, self._nodes[0]).to(parents.dtype))

    def words(self, words: Tensor) -> None:
        """Write the tree mask's bits of the spans' draft tokens, [N, words] int32, in place. Further words are 0."""
        if not self.width:
            return
        bits = (1 << torch.arange(self.width + 1, device=words.device)).expand(len(self), -1).clone()
        bits[:, self.width] = 0  # the root is seen without a bit
        above = torch.cat([self.spans.parents, torch.full_like(self.spans.bonus[:, None], self.width)], 1)
        for _ in range((self.width - 1).bit_length()):
            bits = bits | bits.gather(1, above)
            above = above.gather(1, above)
        own = bits[:, : self.width].reshape(-1).index_select(0, self._nodes[0])
        words.select(1, 0).index_copy_(0, self._nodes[1], own.to(words.dtype))

    def keys(self, keys: Tensor) -> None:
        """Write the noise keys of the spans' rows among those of the samples, [R, 2] int64, in place."""
        if len(self._keys):
            at = (self._moved + self._depths)[:, :, None].expand(-1, -1, 2)
            own = self._keys.gather(1, at).reshape(-1, 2).index_select(0, self._rows[0])
            keys.index_copy_(0, self._rows[2], own)

    def tree_columns(self, samples: int) -> Tensor:
        """The trees of a step with some samples, as the columns of sampling.compaction.Trees, [5, R] int64.

        Parents, tokens, places, slots, and slots of accepted draft tokens. There must be room for draft tokens.
        """
        columns = self._roots(samples)
        spans, device = self.spans, self.spans.bonus.device
        root, session = torch.zeros_like(spans.bonus)[:, None], torch.arange(len(self), device=device)[:, None]
        own = self._firsts[1][:, None]
        parents = torch.cat([own, own + torch.where(spans.parents == self.width, 0, spans.parents + 1)], 1)
        places = session * self.width + (spans.depths - 1).clamp(min=0)
        places = torch.cat([root + len(self) * self.width, places], 1)
        cells = torch.stack([parents, self._tokens, places, self._slots, self._slots.gather(1, self._depths)])
        return columns.index_copy_(1, self._rows[2], cells.flatten(1).index_select(1, self._rows[0]))

    def _roots(self, samples: int) -> Tensor:
        """The columns of a step without draft tokens."""
        columns = self.taken.new_zeros(5, samples)
        if samples > self.maps.rows.shape[1]:  # roots of other sessions
            columns[0] = torch.arange(samples, device=columns.device)
            columns[2] = len(self) * self.width
        return columns
