"""Judges new weights on sessions that are held out of the training: recent ones, and earlier ones.

New weights are better if their draft chains on recent sessions are longer by more than chance. They must also keep most
of what the first weights accept of earlier traffic: each exchange may lose a little beyond notice, so comparing with
the served weights would let the losses add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.draft.learning.evaluation import ChainEvaluator
from services.draft.learning.objective import Objective, TargetWeights
from services.draft.learning.records.batches import Batch
from services.draft.online.sampler import SegmentSampler
from services.draft.online.swap import LearntWeights

_MIN_ROWS = 64
_KEPT = 0.98  # of the first weights' accept length on earlier traffic


class Weights(NamedTuple):
    """A head's trained weights, and the target's for the same vocabulary."""

    learnt: LearntWeights
    target: TargetWeights


class Verdict(NamedTuple):
    """better: than the served weights; worse: beyond chance. before, after: accept lengths on recent sessions.

    retained: accept length on earlier traffic over that of the first weights; None if it was not needed, or without
        such sessions
    rows: of recent sessions
    """

    better: bool
    worse: bool
    before: float
    after: float
    retained: float | None
    rows: int


class Judge:
    """Compares weights. first: those that the training began with, to which earlier traffic is held."""

    def __init__(self, objective: Objective, sampler: SegmentSampler, first: Weights) -> None:
        self._evaluator = ChainEvaluator(objective, first.target)
        self._sampler = sampler
        self.first = first

    def warm_up(self) -> None:
        """Run the program once."""
        self.accepted(self.first, [self._sampler.empty_batch()])

    def verdict(self, served: Weights, new: Weights) -> Verdict | None:
        """The verdict on new weights; None without enough held-out rows."""
        recent = self._sampler.recent_held_out(_MIN_ROWS)
        if _rows(recent) < _MIN_ROWS:
            return None
        old, now = self.accepted(served, recent), self.accepted(new, recent)
        better, retained = is_better(old, now), None
        earlier = self._sampler.replayed_held_out() if better else []
        if _rows(earlier) >= _MIN_ROWS:
            then, kept = 1 + self.accepted(self.first, earlier), 1 + self.accepted(new, earlier)
            better, retained = not is_better(kept, _KEPT * then), float(kept.mean() / then.mean())
        return Verdict(
            better, is_better(now, old), 1 + float(old.mean()), 1 + float(now.mean()), retained, len(old)
        )  # fmt: skip

    def accepted(self, weights: Weights, batches: Sequence[Batch]) -> NDArray[np.int64]:
        """Accepted tokens of a draft chain behind each row, [n]."""
        found: list[NDArray[np.int64]] = []
        self._evaluator.follow(weights.target)
        for batch in batches:
            accepted, counts = self._evaluator.accepted(weights.learnt.params, batch)
            found.append(accepted[counts])
        return np.concatenate(found)


def _rows(batches: Sequence[Batch]) -> int:
    return sum(int((batch.reach > 0).sum()) for batch in batches)


def is_better(old: NDArray[np.integer] | NDArray[np.floating], new: NDArray[np.integer] | NDArray[np.floating]) -> bool:
    """True if the sum rose by more than the standard error of the rows' differences. old, new: [n]."""
    difference = new - old
    return bool(difference.sum() > math.sqrt(float((difference * difference).sum())))
