"""Chooses segments of the replay buffer for training steps and evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from services.draft.learning.records.batches import Batch, PackShape, build, learnt_rows, plan
from services.draft.online.replay_buffer import ReplayBuffer, Segment, Segments

_CANDIDATES = 24  # segments among which a pack is chosen
_RECENT_PACKS, _EARLIER_PACKS = 8, 16  # packs of training whose rows an evaluation sees, of each kind
_EVALUATED = 2  # rows of a pack of an evaluation over those of training: no gradients, so less time and memory a row


class SegmentSampler:
    """Packs of segments. Every recent row is used `epochs` times on average."""

    def __init__(self, buffer: ReplayBuffer, shape: PackShape, epochs: float) -> None:
        self.buffer = buffer
        self.epochs = epochs
        self._shape = shape
        self._evaluated = replace(shape, learnt=min(_EVALUATED * shape.learnt, shape.length))
        self._recent_rows, self._earlier_rows = _RECENT_PACKS * shape.learnt, _EARLIER_PACKS * shape.learnt
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

    def recent_held_out(self) -> list[Segment]:
        """The latest held-out segments, latest first; only those of the target's present weights if these suffice."""
        segments = self.buffer.recent(held_out=True)[::-1]
        current = self._current(segments)
        enough = self.evaluated_rows(current) >= self._recent_rows
        return self._first(current if enough else segments, self._recent_rows)

    def earliest_held_out(self) -> list[Segment]:
        """The earliest held-out segments of the sample of all traffic, earliest first; of the target's present weights.

        With more of the sample, a shift of the traffic would take it over. A target with other weights does not write
        the earlier texts again.
        """
        return self._first(self._current(self.buffer.sample()), self._earlier_rows)

    @property
    def updated(self) -> bool:
        """True if the target's weights were updated, so that earlier segments may be missing."""
        return self.buffer.version > 0

    def evaluation_packs(self, chosen: Sequence[Segment]) -> Iterator[tuple[Batch, list[Segment]]]:
        """Packs of held-out segments, with the segments of each in its order. Of a long segment, the last rows.

        A random choice of rows, as in training, would differ from pack to pack, and weights be compared on other rows.
        """
        shape = self._evaluated
        records = [replace(s.record, first=max(s.record.first, len(s.record.rows) - shape.learnt)) for s in chosen]
        segments = Segments(records, self.buffer.row_bytes)
        for pack in plan(segments.entries, np.arange(len(segments)), shape, self._order):
            yield build(segments, [pack], shape, self._order), [chosen[i] for i in pack]

    def empty_evaluation(self) -> Batch:
        """A batch of an evaluation without segments, for the warm-up."""
        return build(self.buffer.segments([]), [], self._evaluated, self._order)

    def evaluated_rows(self, chosen: Sequence[Segment]) -> int:
        """Rows of these segments that an evaluation sees."""
        return int(self._counts(chosen).sum())

    def _counts(self, chosen: Sequence[Segment]) -> NDArray[np.int64]:
        return np.minimum(learnt_rows(self.buffer.segments(chosen).entries)[1], self._evaluated.learnt)

    def _current(self, segments: Sequence[Segment]) -> list[Segment]:
        return [segment for segment in segments if segment.version == self.buffer.version]

    def _first(self, chosen: Sequence[Segment], rows: int) -> list[Segment]:
        """The first segments, as many as have a number of evaluated rows."""
        return list(chosen[: int(np.searchsorted(np.cumsum(self._counts(chosen)), rows, side="right"))])
