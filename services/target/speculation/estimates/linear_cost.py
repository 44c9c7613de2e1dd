"""A straight line through measurements: what something takes once, and what it takes each time."""

from __future__ import annotations

_KEPT = 0.98  # what remains of the evidence after a measurement
_PRIOR = 4.0  # measurements that each end of the prior line counts for
_ENDS = (1.0, 6.0)


class LinearCost:
    """seconds = once + each * count, fitted to what was measured lately."""

    def __init__(self, once: float, each: float) -> None:
        """once, each: in seconds, as long as nobody knows."""
        self._sums = [0.0] * 5  # 1, count, count^2, seconds, count * seconds
        self.once, self.each = once, each
        for count in _ENDS:
            self._add(count, once + each * count, _PRIOR)

    def seconds(self, count: float) -> float:
        """What so many take."""
        return self.once + self.each * count

    def observe(self, count: int, seconds: float) -> None:
        """So many took so long; outliers count for twice what was expected."""
        self._sums = [_KEPT * one for one in self._sums]
        self._add(count, min(seconds, 2.0 * self.seconds(count)), 1.0)
        n, x, xx, y, xy = self._sums
        spread = n * xx - x * x
        if spread > 0.01 * n * n:  # else all counts are alike, and the slope stays as it was
            self.each = max((n * xy - x * y) / spread, 0.0)
        self.once = max(y - self.each * x, 0.0) / n

    def _add(self, count: float, seconds: float, weight: float) -> None:
        more = (1.0, count, count * count, seconds, count * seconds)
        self._sums = [old + weight * new for old, new in zip(self._sums, more, strict=True)]
