"""Chooses segments of the replay buffer for training steps and evaluations."""

from __future__ import annotations

import numpy as np

from services.draft.learning.batches import Batch, PackShape, build, learnt_rows, plan
from services.draft.online.replay_buffer import ReplayBuffer, Segments

_CANDIDATES = 24  # segments among which a pack is chosen
_EVALUATION_PACKS = 4


class SegmentSampler:
    """Packs of segments. Every row is used `epochs` times on average."""

    def __init__(self, buffer: ReplayBuffer, shape: PackShape, epochs: float) -> None:
        self.buffer = buffer
        self.epochs = epochs
        self._shape = shape
        self._order = np.random.default_rng(0)
        self._clears = self._used_before = 0  # clears of the buffer; rows that were used before the last clear

    def empty_batch(self) -> Batch:
        """A batch without segments, for the warm-up."""
        return build(Segments([], self.buffer.row_bytes), [], self._shape, self._order)

    def training_batch(self, used: int) -> Batch | None:
        """A pack of random segments; None if all were used often enough. used: rows in all steps so far."""
        if self._clears != self.buffer.clears:
            self._clears, self._used_before = self.buffer.clears, used
        if used - self._used_before >= self.buffer.learnt * self.epochs:
            return None
        segments = self.buffer.segments(held_out=False)
        counts = learnt_rows(segments.entries)[1]
        if counts.sum() < self._shape.learnt:
            return None
        some = self._order.permutation(len(segments))[:_CANDIDATES]
        packs = plan(segments.entries, some, self._shape, self._order)
        fullest = max(packs, key=lambda pack: int(counts[pack].sum()))
        return build(segments, [fullest], self._shape, self._order)

    def held_out_batches(self) -> list[Batch]:
        """The latest held-out segments, in packs."""
        segments = self.buffer.segments(held_out=True)
        if not len(segments):
            return []
        latest = np.arange(max(0, len(segments) - _EVALUATION_PACKS * _CANDIDATES), len(segments))
        packs = plan(segments.entries, latest, self._shape, self._order)[:_EVALUATION_PACKS]
        return [build(segments, [pack], self._shape, self._order) for pack in packs]
