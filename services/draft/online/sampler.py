"""Chooses segments of the replay buffer for training steps and evaluations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.draft.learning.records.batches import Batch, PackShape, build, learnt_rows, plan
from services.draft.online.replay_buffer import ReplayBuffer, Segment

_CANDIDATES = 24  # segments among which a pack is chosen
_EVALUATION_PACKS = 8


class SegmentSampler:
    """Packs of segments. Every recent row is used `epochs` times on average."""

    def __init__(self, buffer: ReplayBuffer, shape: PackShape, epochs: float) -> None:
        self.buffer = buffer
        self.epochs = epochs
        self._shape = shape
        self._evaluated = _EVALUATION_PACKS * shape.learnt  # rows of an evaluation
        self._order = np.random.default_rng(0)
        self.used = 0  # recent rows that were used, or dropped from the buffer before

    def empty_batch(self) -> Batch:
        """A batch without segments, for the warm-up."""
        return build(self.buffer.segments([]), [], self._shape, self._order)

    def training_batch(self) -> Batch | None:
        """A pack of random segments; None if all recent ones were used often enough."""
        learnt = self.buffer.learnt
        self.used = max(self.used, round((learnt - self.buffer.recent_learnt) * self.epochs))
        if self.used >= learnt * self.epochs:
            return None
        batch = self._random_pack(self.buffer.recent(held_out=False))
        if batch is not None:
            self.used += int((batch.reach > 0).sum())
        return batch

    def _random_pack(self, chosen: Sequence[Segment]) -> Batch | None:
        """The fullest pack of some random segments; None if all together do not fill one."""
        segments = self.buffer.segments(chosen)
        counts = learnt_rows(segments.entries)[1]
        if counts.sum() < self._shape.learnt:
            return None
        some = self._order.permutation(len(segments))[:_CANDIDATES]
        packs = plan(segments.entries, some, self._shape, self._order)
        fullest = max(packs, key=lambda pack: int(counts[pack].sum()))
        return build(segments, [fullest], self._shape, self._order)

    def recent_held_out(self) -> list[Batch]:
        """The latest held-out segments, in packs; only those of the target's present weights if these suffice."""
        segments = self.buffer.recent(held_out=True)[::-1]
        current = self._current(segments)
        return self._packs(current if self._counts(current).sum() >= self._evaluated else segments)

    def earliest_held_out(self) -> list[Batch]:
        """The earliest held-out segments of the sample of all traffic, in packs; of the target's present weights.

        With more of the sample, a shift of the traffic would take it over. A target with other weights does not write
        the earlier texts again.
        """
        return self._packs(self._current(self.buffer.sample()))

    def _current(self, segments: Sequence[Segment]) -> list[Segment]:
        return [segment for segment in segments if segment.version == self.buffer.version]

    def _counts(self, chosen: Sequence[Segment]) -> NDArray[np.int64]:
        """Trained rows of each segment in a pack, [n]."""
        return np.minimum(learnt_rows(self.buffer.segments(chosen).entries)[1], self._shape.learnt)

    def _packs(self, chosen: Sequence[Segment]) -> list[Batch]:
        """The first segments, as many as are evaluated."""
        ends = np.cumsum(self._counts(chosen))
        segments = self.buffer.segments(chosen[: int(np.searchsorted(ends, self._evaluated, side="right"))])
        packs = plan(segments.entries, np.arange(len(segments)), self._shape, self._order)
        return [build(segments, [pack], self._shape, self._order) for pack in packs]
