"""Throughput of speculation modes beside one another, while the text under all of them changes.

log(tokens per second of a trial) = level + effect of its mode + noise

The level is how easy the text is; it walks from trial to trial, so that a mode is compared with trials of others that
are close in time. Effects walk slowly. A Kalman filter over both gives estimates, and how far to trust them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import numpy as np

_PRIOR_DEVIATION = 0.5  # of an effect that was never measured
_LEVEL_DEVIATION = 100.0  # of the level before any trial: unknown
_WALK = 1e-4  # variance that a second adds to effects: 0.08 of throughput in a minute
_MAX_SURPRISE = 2.5  # deviations that a trial may be away; more is half a change, half a disturbance of the machine


class ModeEffects:
    """Effects of some modes at one load."""

    def __init__(self, modes: Iterable[Hashable]) -> None:
        self._place = {mode: place for place, mode in enumerate(modes, 1)}
        deviations = [_LEVEL_DEVIATION] + [_PRIOR_DEVIATION] * len(self._place)
        self._mean, self._covariance = np.zeros(len(deviations)), np.diag(np.square(deviations))

    def rate(self, mode: Hashable) -> float:
        """Expected tokens per second of a mode's next trial."""
        return math.exp(self._mean[0] + self._mean[self._place[mode]])

    def deviation(self, mode: Hashable, other: Hashable) -> float:
        """Standard deviation of the logarithm of the ratio of two modes' throughput."""
        difference = np.zeros(len(self._mean))
        difference[self._place[mode]], difference[self._place[other]] = 1.0, -1.0
        return math.sqrt(max(float(difference @ self._covariance @ difference), 0.0))

    def expect(self, mode: Hashable, rate: float, deviation: float) -> None:
        """A mode that was never measured is predicted to have a throughput. deviation: of its logarithm."""
        self._correct(mode, math.log(rate), deviation**2)

    def relate(self, mode: Hashable, other: Hashable, ratio: float, deviation: float) -> None:
        """Two modes are predicted to have a ratio of throughputs, by which nothing changes that is known as well.

        deviation: of its logarithm, as far as predictions have the same error again and again
        """
        if self.deviation(mode, other) <= deviation:
            return
        place, beside = self._place[mode], self._place[other]
        row = self._covariance[place] - self._covariance[beside]
        gain = row / (float(row[place] - row[beside]) + deviation**2)
        self._mean += gain * (math.log(ratio) - float(self._mean[place] - self._mean[beside]))
        self._covariance -= np.outer(gain, row)

    def scale(self, mode: Hashable, factor: float) -> None:
        """Trials of a mode are known now to have been worth more, or less."""
        self._mean[self._place[mode]] += math.log(factor)

    def observe(self, mode: Hashable, rate: float, noise: float, walk: float, seconds: float) -> None:
        """Add a trial. rate: tokens per second, above 0; seconds: since the last trial ended.

        noise, walk: variances of the logarithm of the rate: by chance, and of the level since the last trial
        """
        self._covariance += np.diag([walk] + [_WALK * seconds] * len(self._place))
        self._correct(mode, math.log(rate), noise)

    def _correct(self, mode: Hashable, value: float, variance: float) -> None:
        """Take the logarithm of a throughput into account."""
        place = self._place[mode]
        difference = value - float(self._mean[0] + self._mean[place])
        expected = float(self._covariance[np.ix_([0, place], [0, place])].sum()) + variance
        excess = max(0.0, difference**2 - _MAX_SURPRISE**2 * expected)
        self._covariance[place, place] += excess / 2
        row = self._covariance[0] + self._covariance[place]
        gain = row / (expected + excess)
        self._mean += gain * difference
        self._covariance -= np.outer(gain, row)
