"""Compaction of the cache after a step: the rows of an accepted path move to the slots of committed tokens.

slots of a step     length + 0, length + 1, ...: draft nodes, in slice order
accepted path       p1 < p2 < ...: the row of p(d) moves to length + d - 1, which is never after its own slot
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.serving.session import Session
from services.target.kernels.kv_cache import KVCache
from services.target.step.batch import Batch, SessionWork
from services.target.step.prepared import PreparedSpans
from services.target.step.upload import UploadBatch, upload


class Moves:
    """The moves of a step, gathered session by session."""

    def __init__(self) -> None:
        self._pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, session: Session, path: Sequence[int]) -> None:
        """Add a session's accepted nodes, before it commits them."""
        nodes = np.array(path, dtype=np.int64)
        away = nodes != np.arange(len(nodes))
        if away.any():
            slots = session.table.slots(session.length, session.length + int(nodes[-1]) + 1)
            self._pairs.append((slots[nodes[away]], slots[: len(nodes)][away]))

    def make(self, cache: KVCache, device: torch.device) -> None:
        """Move the rows of all sessions at once, before any page that was given back is leased again."""
        if not self._pairs:
            return
        with torch.inference_mode():
            sides = [np.concatenate(side) for side in zip(*self._pairs, strict=True)]
            cache.move(*upload(sides, device))


@dataclass(frozen=True)
class Trees:
    """The draft trees of a step as columns over R sampled rows: for each session its root, then its nodes.

    parents: [R] int64, rows; a root is its own parent. tokens: [R] int64, of nodes; undefined for roots
    places:  [R] int64, session * depths + depth - 1 for a node, sessions * depths for a root
    slots:   [2, R] int64: the slot of a node's row, and its slot if it is accepted
    No two children of a node have the same token.
    """

    parents: Tensor
    tokens: Tensor
    places: Tensor
    slots: Tensor
    sessions: int
    depths: int

    def accepted(self, sampled: Tensor) -> Tensor:
        """The accepted nodes and all roots, by a walk along the samples, [R] int64. Returns [R] bool."""
        roots = self.places == self.sessions * self.depths
        met = (sampled[self.parents] == self.tokens) | roots
        above = self.parents
        for _ in range((self.depths - 1).bit_length()):  # levels covered after each iteration: 2, 4, 8, ...
            met = met & met[above]
            above = above[above]
        return met

    def moves(self, sampled: Tensor) -> Tensor:
        """Source and destination slots of accepted rows, by session and depth. Returns [2, S, D] int64, 0 for none."""
        nowhere = self.sessions * self.depths
        places = torch.where(self.accepted(sampled), self.places, nowhere)
        slots = self.slots.new_zeros(2, nowhere + 1).scatter_(1, places.expand(2, -1), self.slots)
        return slots[:, :nowhere].view(2, self.sessions, self.depths)


def of_spans(prepared: PreparedSpans, samples: int) -> Trees:
    """The trees of prepared spans, in a step of some samples. There must be room for draft tokens."""
    columns = prepared.tree_columns(samples)
    return Trees(columns[0], columns[1], columns[2], columns[3:], len(prepared), prepared.width)


def lay_out(works: Sequence[SessionWork], batch: Batch, uploads: UploadBatch) -> Callable[[], Trees]:
    """The trees of sampled sessions, as part of a larger upload. There must be nodes.

    The result may be called once the upload is sent.
    """
    drafts = [work.draft for work in works]
    counts = np.array([len(draft) for draft in drafts])
    roots = np.cumsum(counts + 1) - (counts + 1)
    base, session = np.repeat(roots, counts), np.repeat(np.arange(len(drafts)), counts)
    depth = np.concatenate([draft.depths for draft in drafts]).astype(np.int64)
    depths = int(depth.max())
    nodes = np.delete(np.arange(batch.sample_count), roots)
    slots = batch.layout.slots[batch.rows.sampled[: batch.sample_count]]
    columns = np.zeros((5, batch.sample_count), np.int64)
    columns[0] = np.arange(batch.sample_count)
    columns[0, nodes] = base + 1 + np.concatenate([draft.parents for draft in drafts])
    columns[1, nodes] = np.concatenate([draft.tokens for draft in drafts])
    columns[2] = len(drafts) * depths
    columns[2, nodes] = session * depths + depth - 1
    columns[3, nodes] = slots[nodes]
    columns[4, nodes] = slots[base + depth]
    placed = uploads.add([columns])

    def trees() -> Trees:
        (tensor,) = placed()
        return Trees(tensor[0], tensor[1], tensor[2], tensor[3:], len(drafts), depths)

    return trees
