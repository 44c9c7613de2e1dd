"""An exponential average of a few measurements and more."""

from __future__ import annotations


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
