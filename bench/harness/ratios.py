"""The mean of ratios over rounds, and the ratio of sums over parts, each with its confidence interval."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Part = TypeVar("_Part")

# Student's t at 97.5 %, by degrees of freedom from 1; beyond the table, the normal distribution's 1.96 is used.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip

_RESAMPLES = 1000


@dataclass(frozen=True)
class Ratio:
    """The geometric mean of speedups over rounds, and the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def ratio(ratios: Sequence[float]) -> Ratio:
    """The mean and interval of the ratios of at least one round; the interval of a single round is unbounded."""
    logarithms = [math.log(value) for value in ratios]
    mean = statistics.fmean(logarithms)
    if len(logarithms) == 1:
        return Ratio(math.exp(mean), 0.0, math.inf)
    freedom = len(logarithms) - 1
    half = (_T[freedom - 1] if freedom <= len(_T) else 1.96) * statistics.stdev(logarithms) / math.sqrt(len(logarithms))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def resampled(parts: Sequence[_Part], ratio_of: Callable[[Sequence[_Part]], float]) -> tuple[float, float, float]:
    """The ratio of all parts, and its 95 % interval over random choices of as many of them (bootstrap)."""
    draw = random.Random(0)
    found = sorted(ratio_of(draw.choices(parts, k=len(parts))) for _ in range(_RESAMPLES))
    return ratio_of(parts), found[_RESAMPLES // 40], found[-_RESAMPLES // 40 - 1]
