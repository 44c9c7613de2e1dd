"""Judges new weights on sessions that are held out of the training: recent ones, and the earliest ones in store.

Training on other traffic loses some of what the first weights accept of earlier traffic, at any share of replay, so the
weights that are served lie between the first and the learnt ones (WiSE-FT, arXiv 2109.01903):

    served = first + part * (learnt - first)

This gives up less of what was learnt than it wins back of what was forgotten. Training goes on from the learnt weights.
The part follows from an estimate of the loss (`largest_part`). Weights of that part are better if their draft chains on
recent sessions are longer than those of the served weights by more than chance, or if the served weights have turned
out to lose too much of earlier traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from services.draft.learning.evaluation import ChainEvaluator
from services.draft.learning.objective import Objective, TargetWeights
from services.draft.model.params import Params
from services.draft.online.replay_buffer import Segment
from services.draft.online.sampler import SegmentSampler
from services.draft.online.swap import LearntWeights

_MIN_ROWS = 64
_MAX_LOSS = 0.02  # of the first weights' accept length on earlier traffic, of the served ones' on recent traffic
# Expected loss of learnt weights on earlier traffic before it is measured, and its standard deviation: after 200 to 300
# steps on translations into French the bundled head had lost 3 to 4 % on Spec-Bench.
_PRIOR, _SPREAD = 0.06, 0.02
_MARGIN = 2.0  # standard deviations of the estimated loss that are added to it
_SURE = 3.0  # standard errors that are added to a loss that is measured alone, without the prior
_SPAN = 8  # segments of the shortest span of earlier traffic; others are twice as long, and so on

Tokens = NDArray[np.float64]
"""Tokens per step, summed over the rows of each segment, [n]: of sampled sessions what is expected of all samples."""


class Weights(NamedTuple):
    """A head's trained weights, and the target's for the same vocabulary.

    part: of the way from the first weights to learnt ones at which they lie
    """

    learnt: LearntWeights
    target: TargetWeights
    part: float = 1.0


class Retention(NamedTuple):
    """Accept lengths on earlier traffic over those of the first weights.

    segments, rows: the span on which most is lost
    learnt, chosen: of the learnt weights, and of those that would serve
    forgetting: the served weights lose more than they may, beyond chance
    """

    segments: int
    rows: int
    learnt: float
    chosen: float
    forgetting: bool


class Verdict(NamedTuple):
    """better: to be served; worse: beyond chance, and by more than `_MAX_LOSS`.

    before, after: accept lengths on recent sessions
    weights: to serve if they are better
    rows: of recent sessions
    retention: None without earlier sessions
    """

    better: bool
    worse: bool
    before: float
    after: float
    weights: Weights
    rows: int
    retention: Retention | None

    def text(self) -> str:
        """For the log."""
        recent = f"accept length {self.after:.3f}, was {self.before:.3f}, on {self.rows} held-out rows"
        if self.retention is None:
            return f"{recent}; no earlier rows; {'served' if self.better else 'not served'}"
        segments, rows, learnt, chosen, forgetting = self.retention
        return (
            f"{recent}; {self.weights.part:.0%} of the way to weights that keep {learnt:.1%} of the first ones' accept "
            f"length on {rows} earlier rows of {segments} segments keeps {chosen:.1%}; "
            f"{'served' if self.better else 'not served'}{', the former ones forget too much' * forgetting}"
        )


class Judge:
    """Compares weights. first: those that the training began with, to which earlier traffic is held."""

    def __init__(self, objective: Objective, sampler: SegmentSampler, first: Weights) -> None:
        self._evaluator = ChainEvaluator(objective, first.target)
        self._sampler = sampler
        self.follow(first)

    def follow(self, first: Weights) -> None:
        """Hold earlier traffic to these weights from now on. Any thread may call."""
        self.first, self._first, self._served = first, _Scores(first), _Scores(first)

    def warm_up(self) -> None:
        """Run the programs once."""
        weights = self.between(self.first, 0.5)
        self._evaluator.follow(weights.target)
        self._evaluator.expected(weights.learnt.params, self._sampler.empty_evaluation())

    def verdict(self, served: Weights, new: Weights) -> Verdict | None:
        """The verdict on new weights; None without enough held-out rows."""
        recent, earlier = self._sampler.recent_held_out(), self._sampler.earliest_held_out()
        rows = self._sampler.evaluated_rows(recent)
        if rows < _MIN_ROWS:
            return None
        first, serving = self._first, self._served if self._served.weights is served else _Scores(served)
        if len(earlier) >= (_SPAN if self._sampler.updated else 1):
            chosen, retention = self._retaining(first, serving, new, earlier)
        else:
            chosen, retention = _Scores(self.between(new, 1.0)), None
        before, after = self._tokens(serving, recent), self._tokens(chosen, recent)
        better = is_better(before, after) or (retention is not None and retention.forgetting)
        self._served = chosen if better else serving
        for scores in (first, self._served):
            scores.keep((*recent, *earlier))
        # Sampled sessions show small losses beyond chance, from which training recovers.
        worse = not better and is_better(after, before) and bool(after.sum() < (1 - _MAX_LOSS) * before.sum())
        return Verdict(
            better, worse, float(before.sum() / rows), float(after.sum() / rows),
            chosen.weights, rows, retention,
        )  # fmt: skip

    def _retaining(
        self, first: _Scores, serving: _Scores, new: Weights, earlier: Sequence[Segment]
    ) -> tuple[_Scores, Retention]:
        """The weights on the way to new ones that keep enough of earlier traffic."""
        then, learnt = self._tokens(first, earlier), self._tokens(_Scores(new), earlier)
        # The prior is of the first weights and their target; a trainer may update the target every minute.
        loss = loss_bound(then, learnt, _MARGIN, math.inf if self._sampler.updated else _SPREAD)
        chosen = _Scores(self.between(new, largest_part(loss.bound)))
        now, later = self._tokens(serving, earlier), self._tokens(chosen, earlier)
        lost, count = loss_bound(then, now, -1.0, math.inf)
        forgetting = lost > _MAX_LOSS and bool(later[:count].sum() > now[:count].sum())
        span = slice(loss.segments)
        learnt_kept, kept = (float(tokens[span].sum() / then[span].sum()) for tokens in (learnt, later))
        return chosen, Retention(
            loss.segments, self._sampler.evaluated_rows(earlier[span]), learnt_kept, kept, forgetting
        )

    def between(self, new: Weights, part: float) -> Weights:
        """Weights at a part of the way from the first ones to new ones. Entries of other tokens are the new ones'."""
        params = _between(self.first.learnt.params, new.learnt.params, part, self._places(new.learnt.ids))
        return Weights(LearntWeights(params, new.learnt.ids), new.target, part)

    def with_first_output(self, params: Params, ids: NDArray[np.int64]) -> Params:
        """With the first weights' output layer where their vocabulary has the token. params: donated."""
        return _with_output(params, self.first.learnt.params, self._places(ids)) if "head" in params else params

    def _places(self, ids: NDArray[np.int64]) -> jax.Array:
        """The first weights' entries for tokens, -1 without one."""
        return self.first.target.draft_ids[ids]

    def behind(self, served: Weights) -> Weights:
        """The learnt weights that served ones lie on the way to."""
        return served if served.part == 1 else self.between(served, 1 / served.part)._replace(part=1.0)

    def _tokens(self, scores: _Scores, segments: Sequence[Segment]) -> Tokens:
        """Tokens per step of draft chains, summed over the rows of each segment."""
        missing = [segment for segment in segments if segment.number not in scores.known]
        numbers = [segment.number for segment in missing]
        scores.known |= dict(zip(numbers, self._evaluate(scores.weights, missing), strict=True))
        return np.array([scores.known[segment.number] for segment in segments], np.float64)

    def _evaluate(self, weights: Weights, segments: Sequence[Segment]) -> list[float]:
        found: dict[int, float] = {}
        self._evaluator.follow(weights.target)
        for batch, pack in self._sampler.evaluation_packs(segments):
            accepted, counts = self._evaluator.expected(weights.learnt.params, batch)
            own = np.take_along_axis(batch.segments, batch.rows, axis=1)[counts] - 1
            sums = np.bincount(own, 1 + accepted[counts], len(pack)).tolist()
            found |= {segment.number: tokens for segment, tokens in zip(pack, sums, strict=True)}
        return [found[segment.number] for segment in segments]


class _Scores:
    """Tokens per step of some weights on held-out segments, by number of the segment: each is evaluated once."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.known: dict[int, float] = {}

    def keep(self, segments: Sequence[Segment]) -> None:
        """Drop other segments."""
        numbers = {segment.number for segment in segments}
        self.known = {number: tokens for number, tokens in self.known.items() if number in numbers}


@jax.jit
def _between(first: Params, learnt: Params, part: float, places: jax.Array) -> Params:
    """Parameters between others. places: the first ones' entry for the token of each entry, -1 without one."""
    if "head" in first:
        first = first | {"head": _known(first, learnt, places)}
    mixed: Params = jax.tree.map(lambda a, b: a + part * (b - a), first, learnt)
    return mixed


@partial(jax.jit, donate_argnums=0)
def _with_output(params: Params, first: Params, places: jax.Array) -> Params:
    return params | {"head": _known(first, params, places)}


def _known(first: Params, other: Params, places: jax.Array) -> jax.Array:
    """The output layer of the first weights, where they have the token, else that of others."""
    return jnp.where(places >= 0, first["head"][:, places], other["head"])


def largest_part(loss: float) -> float:
    """The largest part of the way to learnt weights of a loss at which no more than `_MAX_LOSS` is lost.

    The loss grows with the square of the part, because the first weights are about the best ones for earlier traffic.
    So the loss of the learnt weights, which stands out best of the noise, gives that of all parts. If parts were tried
    one by one, a part too large would pass by luck at one of many evaluations, and then stay.
    """
    return 1.0 if loss <= _MAX_LOSS else math.sqrt(_MAX_LOSS / loss)


class Loss(NamedTuple):
    """bound: of what is lost of the first weights' accept length on the earliest `segments`."""

    bound: float
    segments: int


def loss_bound(first: Tokens, other: Tokens, deviations: float = _MARGIN, spread: float = _SPREAD) -> Loss:
    """What other weights lose on earlier traffic, with a margin.

    first, other: on the same segments, earliest first
    deviations: standard deviations above the estimate
    spread: standard deviation of what is expected before it is measured; infinite for the measured loss alone

    Spans that begin with the earliest segment are judged on their own, and the one that loses most counts: traffic may
    have shifted within the segments, and gains behind the shift must not make up for losses before it.
    """
    longer = (_SPAN << i for i in range(len(first).bit_length()))
    spans = [*(length for length in longer if length < len(first)), len(first)]
    return max(Loss(_span_bound(first[:n], other[:n], deviations, spread), n) for n in spans)


def _span_bound(first: Tokens, other: Tokens, deviations: float, spread: float) -> float:
    """As of `loss_bound`, for one span: from the measured loss and the prior, or from what is measured alone."""
    count = len(first)
    if count == 1:
        return _PRIOR + deviations * spread
    ratio = float(other.sum() / first.sum())
    residuals = other - ratio * first
    error = math.sqrt(float((residuals**2).sum()) * count / (count - 1)) / float(first.sum())
    weight = 1 / (1 + (error / spread) ** 2)
    bound = weight * (1 - ratio) + (1 - weight) * _PRIOR + deviations * math.sqrt(weight) * error
    return bound if count < _SPAN else min(bound, 1 - ratio + _SURE * error)


def is_better(old: Tokens, new: Tokens) -> bool:
    """True if the sum rose by more than the standard error of the segments' differences."""
    difference = new - old
    return bool(difference.sum() > math.sqrt(float((difference**2).sum())))
