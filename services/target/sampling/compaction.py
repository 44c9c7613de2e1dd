"""Compacting the cache after a step: the rows of an accepted path move up to where they belong as committed tokens.

slots of a step     length + 0, length + 1, ...: draft nodes, in slice order
accepted path       p1 < p2 < ...: the row of p(d) belongs at length + d - 1, which is never behind it
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
from services.target.step.upload import UploadBatch, upload


class Moves:
    """The moves of a step, gathered session by session."""

    def __init__(self) -> None:
        self._pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, session: Session, path: Sequence[int]) -> None:
        """A session accepts some of its nodes, and has not committed them yet."""
        nodes = np.array(path, dtype=np.int64)
        away = nodes != np.arange(len(nodes))
        if away.any():
            slots = session.table.slots(session.length, session.length + int(nodes[-1]) + 1)
            self._pairs.append((slots[nodes[away]], slots[: len(nodes)][away]))

    def make(self, cache: KVCache, device: torch.device) -> None:
        """Move rows for all sessions at once. Pages given back must not have been leased again before this."""
        if not self._pairs:
            return
        with torch.inference_mode():
            sides = [np.concatenate(side) for side in zip(*self._pairs, strict=True)]
            cache.move(*upload(sides, device))


@dataclass(frozen=True)
class Trees:
    """The drafts of a step as columns over the R rows that are drawn after: of each session its root, then its nodes.

    parents: [R] int64, rows; a root is its own. tokens: [R] int64, those of nodes; of no meaning for roots
    places:  [R] int64, session * depths + depth - 1 for a node, sessions * depths for a root
    slots:   [2, R] int64: where a node's row lies, and where it belongs if it is accepted
    No two children of a node have the same token.
    """

    parents: Tensor
    tokens: Tensor
    places: Tensor
    slots: Tensor
    sessions: int
    depths: int

    def accepted(self, drawn: Tensor) -> Tensor:
        """Nodes that the walk along the draws meets, and all roots. drawn: [R] int64. Returns [R] bool."""
        roots = self.places == self.sessions * self.depths
        met = (drawn[self.parents] == self.tokens) | roots
        above = self.parents
        for _ in range((self.depths - 1).bit_length()):  # so many levels are looked at: 1, 2, 4, ...
            met = met & met[above]
            above = above[above]
        return met

    def moves(self, drawn: Tensor) -> Tensor:
        """Slots from and to which accepted rows move, by session and depth. Returns [2, S, D] int64, 0 for nothing."""
        nowhere = self.sessions * self.depths
        places = torch.where(self.accepted(drawn), self.places, nowhere)
        slots = self.slots.new_zeros(2, nowhere + 1).scatter_(1, places.expand(2, -1), self.slots)
        return slots[:, :nowhere].view(2, self.sessions, self.depths)


def lay_out(works: Sequence[SessionWork], batch: Batch, parcel: UploadBatch) -> Callable[[], Trees]:
    """The trees of sessions that are drawn for, in a parcel that is to be sent. There must be nodes."""
    drafts = [work.draft for work in works]
    counts = np.array([len(draft) for draft in drafts])
    roots = np.cumsum(counts + 1) - (counts + 1)
    base, session = np.repeat(roots, counts), np.repeat(np.arange(len(drafts)), counts)
    depth = np.concatenate([draft.depths for draft in drafts]).astype(np.int64)
    depths = int(depth.max())
    nodes = np.delete(np.arange(batch.drawn), roots)
    slots = batch.layout.slots[batch.rows.sampled[: batch.drawn]]
    columns = np.zeros((5, batch.drawn), np.int64)
    columns[0] = np.arange(batch.drawn)
    columns[0, nodes] = base + 1 + np.concatenate([draft.parents for draft in drafts])
    columns[1, nodes] = np.concatenate([draft.tokens for draft in drafts])
    columns[2] = len(drafts) * depths
    columns[2, nodes] = session * depths + depth - 1
    columns[3, nodes] = slots[nodes]
    columns[4, nodes] = slots[base + depth]
    placed = parcel.add([columns])

    def trees() -> Trees:
        (tensor,) = placed()
        return Trees(tensor[0], tensor[1], tensor[2], tensor[3:], len(drafts), depths)

    return trees
