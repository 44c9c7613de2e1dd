"""An exponential average of a few measurements and more."""

from __future__ import annotations

_EMA_WEIGHT = 0.1


class Average:
    """value: of what was added; 0 before. count: of the values."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        """Add a value; the first ones count equally."""
        self.count += 1
        self.value += max(_EMA_WEIGHT, 1 / self.count) * (value - self.value)
