"""What a step costs: measured at start-up as a function of its rows and of the keys that they see.

Up to some number of rows a step takes hardly longer than its reading of the weights; beyond, arithmetic counts. Where
that bend is differs between machines, models and number formats, so it is measured; between measured points the cost is
interpolated, and beyond the last one it goes on as before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


class StepCost:
    """Seconds of a step."""

    def __init__(self, seconds: Mapping[int, float], seconds_per_key: float = 0.0) -> None:
        """seconds: of steps with some numbers of rows, measured. seconds_per_key: of each key that a session has."""
        counts = sorted(seconds)
        self._rows = np.array(counts, np.float64)
        # What takes longer with fewer rows was disturbed: no step is cheaper for having more rows.
        self._seconds = np.minimum.accumulate(np.array([seconds[count] for count in counts])[::-1])[::-1]
        self.seconds_per_key = seconds_per_key
        steep = 0.0
        if len(counts) > 1:
            steep = float((self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2]))
        self._beyond = max(steep, 0.0)

    def seconds(self, rows: NDArray[np.integer], keys: int = 0) -> NDArray[np.float64]:
        """Seconds of steps. rows: [n], rows in all. keys: of all sessions together. Returns [n] float64."""
        inside = np.interp(rows, self._rows, self._seconds)
        return inside + np.maximum(rows - self._rows[-1], 0.0) * self._beyond + keys * self.seconds_per_key

    def describe(self) -> str:
        """The measured points, for people."""
        points = ", ".join(f"{int(n)}: {1e3 * s:.1f}" for n, s in zip(self._rows, self._seconds, strict=True))
        return f"ms a step by rows: {points}; {1e6 * self.seconds_per_key:.2f} us for each 1 key of context"


FREE = StepCost({1: 1e-3})  # before anything is measured: rows cost nothing more
