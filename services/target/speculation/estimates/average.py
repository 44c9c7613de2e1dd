"""An exponential average of a few measurements and more."""

from __future__ import annotations

WEIGHT = 0.22  # of the last value, where each is a good measurement by itself: times of steps, waits and answers
SLOW_WEIGHT = 0.05  # the same where values vary by chance: tokens of a step, in easy and hard lines of text


class Average:
    """value: of what was added; 0 before. count: of the values."""

    def __init__(self, weight: float) -> None:
        """weight: of the last value."""
        self.value, self.count = 0.0, 0
        self._weight = weight

    def add(self, value: float) -> None:
        """Add a value; the first ones count equally."""
        self.count += 1
        self.value += max(self._weight, 1 / self.count) * (value - self.value)
