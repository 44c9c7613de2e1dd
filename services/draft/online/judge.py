"""Judges new weights on sessions that are held out of the training: recent ones, and the earliest ones in store.

New weights are better if their draft chains on recent sessions are longer by more than chance. They must also keep most
of what the first weights accept of earlier traffic. Training on other traffic loses some of that at any share of
replay, so the weights that are served lie between the first and the learnt ones (WiSE-FT, arXiv 2109.01903):

    served = first + part * (learnt - first)

with the largest part up to a half that keeps enough beyond chance, or the learnt ones if they are better on earlier
traffic, too. This gives up less of what was learnt than it wins back of what was forgotten. Training goes on from the
learnt weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from services.draft.learning.evaluation import ChainEvaluator
from services.draft.learning.objective import Objective, TargetWeights
from services.draft.learning.records.batches import Batch
from services.draft.model.params import Params
from services.draft.online.sampler import SegmentSampler
from services.draft.online.swap import LearntWeights

_MIN_ROWS = 64
_KEPT = 0.98  # of the first weights' accept length on earlier traffic
_PARTS = 0.5, 0.4, 0.3, 0.2, 0.1  # of the way to the learnt weights, where these alone forget


class Weights(NamedTuple):
    """A head's trained weights, and the target's for the same vocabulary.

    part: of the way from the first weights to learnt ones at which they lie
    """

    learnt: LearntWeights
    target: TargetWeights
    part: float = 1.0


class Verdict(NamedTuple):
    """better: than the served weights; worse: beyond chance. before, after: accept lengths on recent sessions.

    weights: to serve if they are better
    retained: accept length on earlier traffic over that of the first weights; None without such sessions
    rows: of recent sessions
    """

    better: bool
    worse: bool
    before: float
    after: float
    weights: Weights
    retained: float | None
    rows: int


class Judge:
    """Compares weights. first: those that the training began with, to which earlier traffic is held."""

    def __init__(self, objective: Objective, sampler: SegmentSampler, first: Weights) -> None:
        self._evaluator = ChainEvaluator(objective, first.target)
        self._sampler = sampler
        self.first = first

    def warm_up(self) -> None:
        """Run the programs once."""
        self.accepted(self.between(self.first, 0.5), [self._sampler.empty_batch()])

    def verdict(self, served: Weights, new: Weights) -> Verdict | None:
        """The verdict on new weights; None without enough held-out rows."""
        recent = self._sampler.recent_held_out()
        if _rows(recent) < _MIN_ROWS:
            return None
        weights, retained, enough = new, None, True
        if _rows(earlier := self._sampler.earliest_held_out()) >= _MIN_ROWS:
            weights, retained, enough = self.retaining(new, earlier)
        old, now = self.accepted(served, recent), self.accepted(weights, recent)
        return Verdict(
            enough and is_better(old, now), is_better(now, old), 1 + float(old.mean()), 1 + float(now.mean()),
            weights, retained, len(old),
        )  # fmt: skip

    def retaining(self, new: Weights, earlier: Sequence[Batch]) -> tuple[Weights, float, bool]:
        """The weights nearest to the new ones that keep enough of earlier traffic, beyond chance.

        With what they keep, and whether it is enough.
        """
        then, enough = 1 + self.accepted(self.first, earlier), False
        for part in (1.0, *_PARTS):
            weights = self.between(new, part) if part < 1 else new
            kept = 1 + self.accepted(weights, earlier)
            if enough := is_better((_KEPT if part < 1 else 1.0) * then, kept):
                break
        return weights, float(kept.mean() / then.mean()), enough

    def between(self, new: Weights, part: float) -> Weights:
        """Weights at a part of the way from the first ones to new ones. Entries of other tokens are the new ones'."""
        learnt = new.learnt
        places = self.first.target.draft_ids[learnt.ids]
        params = _between(self.first.learnt.params, learnt.params, part, places)
        return Weights(LearntWeights(params, learnt.ids), new.target, part)

    def behind(self, served: Weights) -> Weights:
        """The learnt weights that served ones lie on the way to."""
        return served if served.part == 1 else self.between(served, 1 / served.part)._replace(part=1.0)

    def accepted(self, weights: Weights, batches: Sequence[Batch]) -> NDArray[np.int64]:
        """Accepted tokens of a draft chain behind each row, [n]."""
        found: list[NDArray[np.int64]] = []
        self._evaluator.follow(weights.target)
        for batch in batches:
            accepted, counts = self._evaluator.accepted(weights.learnt.params, batch)
            found.append(accepted[counts])
        return np.concatenate(found)


@jax.jit
def _between(first: Params, learnt: Params, part: float, places: jax.Array) -> Params:
    """Parameters between others. places: the first ones' entry for the token of each entry, -1 without one."""
    if "head" in first:
        known = jnp.where(places >= 0, first["head"][:, places], learnt["head"])
        first = first | {"head": known}
    mixed: Params = jax.tree.map(lambda a, b: a + part * (b - a), first, learnt)
    return mixed


def _rows(batches: Sequence[Batch]) -> int:
    return sum(int((batch.reach > 0).sum()) for batch in batches)


def is_better(old: NDArray[np.integer] | NDArray[np.floating], new: NDArray[np.integer] | NDArray[np.floating]) -> bool:
    """True if the sum rose by more than the standard error of the rows' differences. old, new: [n]."""
    difference = new - old
    return bool(difference.sum() > math.sqrt(float((difference * difference).sum())))
