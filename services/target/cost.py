"""What a step costs: measured at start-up as a function of its rows and of the keys that they see, kept true by steps.

Up to some number of rows a step takes hardly longer than its reading of the weights; beyond, arithmetic counts. Where
that bend is differs between machines, models and number formats, so it is measured; between measured points the cost is
interpolated, and beyond the last one it goes on as before it. At start-up other processes start too, and under load
they take their part of the machine; so every step corrects the points that its rows lie between.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_KEPT = 0.99  # what remains of the evidence after a step that adds to it
_PRIOR = 4.0  # steps that the correction of all points counts for at each
_MOST = 2.0  # what takes longer than so many times the expected was held up, and tells no more than that
_EVERY = 8  # steps, between two corrections


class StepCost:
    """Seconds of a step."""

    def __init__(self, seconds: Mapping[int, float], seconds_per_key: float = 0.0) -> None:
        """seconds: of steps with some numbers of rows, measured. seconds_per_key: of each key that a session has."""
        counts = sorted(seconds)
        self._rows = np.array(counts, np.float64)
        self._measured = _rising(np.array([seconds[count] for count in counts]))
        self._ratios = np.zeros(len(counts))  # weighted sums of what steps took over what was measured
        self._weights = np.zeros(len(counts))
        self._observed = 0
        self.seconds_per_key = seconds_per_key
        self._correct(self._measured)

    def _correct(self, seconds: NDArray[np.float64]) -> None:
        self._seconds = seconds
        self._beyond = 0.0
        if len(seconds) > 1:
            self._beyond = float((seconds[-1] - seconds[-2]) / (self._rows[-1] - self._rows[-2]))

    def seconds(self, rows: NDArray[np.integer], keys: int = 0) -> NDArray[np.float64]:
        """Seconds of steps. rows: [n], rows in all. keys: of all sessions together. Returns [n] float64."""
        inside = np.interp(rows, self._rows, self._seconds)
        return inside + np.maximum(rows - self._rows[-1], 0.0) * self._beyond + keys * self.seconds_per_key

    def observe(self, rows: int, keys: int, seconds: float) -> None:
        """Take in what a step took. Those of more rows than were measured, which are prompts, tell nothing."""
        if rows > self._rows[-1]:
            return
        above = int(np.searchsorted(self._rows, rows))
        below = max(above - 1, 0) if rows < self._rows[above] else above
        share = (rows - self._rows[below]) / (self._rows[above] - self._rows[below]) if above > below else 0.0
        expected = float(self.seconds(np.array([rows]), keys)[0])
        measured = float(np.interp(rows, self._rows, self._measured)) + keys * self.seconds_per_key
        ratio = min(seconds, _MOST * expected) / measured
        self._ratios *= _KEPT
        self._weights *= _KEPT
        for point, weight in ((below, 1.0 - share), (above, share)):
            self._ratios[point] += weight * ratio
            self._weights[point] += weight
        self._observed += 1
        if self._observed % _EVERY == 0:
            overall = float(self._ratios.sum() / self._weights.sum())
            ratios = (self._ratios + _PRIOR * overall) / (self._weights + _PRIOR)
            self._correct(_rising(self._measured * ratios))

    def describe(self) -> str:
        """The measured points, for people."""
        points = ", ".join(f"{int(n)}: {1e3 * s:.1f}" for n, s in zip(self._rows, self._seconds, strict=True))
        return f"ms a step by rows: {points}; {1e6 * self.seconds_per_key:.2f} us for each 1 key of context"


def free() -> StepCost:
    """Before anything is measured: rows cost nothing more."""
    return StepCost({1: 1e-3})


def _rising(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """What takes longer with fewer rows was disturbed: no step is cheaper for having more rows."""
    rising: NDArray[np.float64] = np.minimum.accumulate(seconds[::-1])[::-1]
    return rising
