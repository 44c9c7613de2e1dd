"""A linear cost model: seconds = fixed + each * count, fitted to recent measurements.

Drafting with the local EAGLE head needs it: its cost per token decides how deep chains are, and the counts that are
measured lie close together, where a correction of fixed points (step_cost.py) cannot separate the two parts.
"""

from __future__ import annotations

from services.target.speculation.estimates.step_cost import DECAY, MAX_EXCESS, PRIOR

_ENDS = (1.0, 6.0)  # counts at the two ends of the prior line, each of which counts for PRIOR measurements
_MIN_VARIANCE = 0.01  # of the counts; below, the slope stays as it was


class LinearCost:
    """The fit. fixed: seconds independent of the count; each: seconds per count."""

    def __init__(self, fixed: float, each: float) -> None:
        """fixed, each: the prior, in seconds."""
        self._sums = [0.0] * 5  # weighted sums of 1, count, count^2, seconds, count * seconds
        self.fixed, self.each = fixed, each
        for count in _ENDS:
            self._add(count, fixed + each * count, PRIOR)

    def seconds(self, count: float) -> float:
        """The estimate for a count."""
        return self.fixed + self.each * count

    def observe(self, count: int, seconds: float) -> None:
        """Add a measurement."""
        self._sums = [DECAY * one for one in self._sums]
        self._add(count, min(seconds, MAX_EXCESS * self.seconds(count)), 1.0)
        n, x, xx, y, xy = self._sums
        spread = n * xx - x * x
        if spread > _MIN_VARIANCE * n * n:
            self.each = max((n * xy - x * y) / spread, 0.0)
        self.fixed = max(y - self.each * x, 0.0) / n

    def _add(self, count: float, seconds: float, weight: float) -> None:
        more = (1.0, count, count * count, seconds, count * seconds)
        self._sums = [old + weight * new for old, new in zip(self._sums, more, strict=True)]
