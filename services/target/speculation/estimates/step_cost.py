"""What a step costs: measured at start-up as a function of its rows and of the keys that they see, kept true by steps.

Up to some number of rows a step takes hardly longer than its reading of the weights; beyond, arithmetic counts. Where
that bend is differs between machines, models and number formats, so it is measured; between measured points the cost is
interpolated, and beyond the last one it goes on as before it. At start-up other processes start too, and under load
they take their part of the machine; so every step corrects the points that its rows lie between.
"""

from __future__ import annotations

from bisect import bisect_right
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
        self._ratios = [0.0] * len(counts)  # weighted sums of what steps took over what was measured
        self._weights = [0.0] * len(counts)
        self._observed = 0
        self.seconds_per_key = seconds_per_key
        self._points = counts
        self._heights: list[float] = self._measured.tolist()
        self._correct(self._measured)

    def _correct(self, seconds: NDArray[np.float64]) -> None:
        self._seconds = seconds
        self._beyond = 0.0
        if len(seconds) > 1:
            self._beyond = float((seconds[-1] - seconds[-2]) / (self._rows[-1] - self._rows[-2]))
        # Seconds of one row more than at each point, up to the next.
        self._slopes: list[float] = [*(np.diff(seconds) / np.diff(self._rows)).tolist(), self._beyond]
        self._corrected: list[float] = seconds.tolist()

    def seconds(self, rows: NDArray[np.integer], keys: int = 0) -> NDArray[np.float64]:
        """Seconds of steps. rows: [n], rows in all. keys: of all sessions together. Returns [n] float64."""
        inside = np.interp(rows, self._rows, self._seconds)
        return inside + np.maximum(rows - self._rows[-1], 0.0) * self._beyond + keys * self.seconds_per_key

    def step(self, rows: int, keys: int, most: int = 1) -> tuple[float, float]:
        """Seconds of a step, and of the cheapest of the next `most` rows that may be added to it. Every step asks."""
        at = bisect_right(self._points, rows) - 1
        if at < 0:  # fewer rows than were measured
            return self._corrected[0] + keys * self.seconds_per_key, 0.0
        seconds = self._corrected[at] + (rows - self._points[at]) * self._slopes[at]
        last = bisect_right(self._points, rows + most - 1)
        return seconds + keys * self.seconds_per_key, min(self._slopes[at:last])

    def others(self, rows: int, own: int) -> float:
        """Seconds of a step that its rows beyond `own` take: of prompts, which are computed in any case."""
        return self.step(rows, 0)[0] - self.step(own, 0)[0] if rows > own else 0.0

    def observe(self, rows: int, keys: int, seconds: float) -> None:
        """Take in what a step took. Those of more rows than were measured, which are prompts, tell nothing."""
        points, last = self._points, len(self._points) - 1
        if rows > points[last]:
            return
        below = max(bisect_right(points, rows) - 1, 0)
        above = min(below + 1, last)
        share = (rows - points[below]) / (points[above] - points[below]) if rows > points[below] else 0.0
        expected, _ = self.step(rows, keys)
        measured = self._heights[below] * (1.0 - share) + self._heights[above] * share + keys * self.seconds_per_key
        ratio = min(seconds, _MOST * expected) / measured
        self._ratios = [kept * _KEPT for kept in self._ratios]
        self._weights = [kept * _KEPT for kept in self._weights]
        for point, weight in ((below, 1.0 - share), (above, share)):
            self._ratios[point] += weight * ratio
            self._weights[point] += weight
        self._observed += 1
        if self._observed % _EVERY == 0:
            overall = sum(self._ratios) / sum(self._weights)
            ratios = (np.array(self._ratios) + _PRIOR * overall) / (np.array(self._weights) + _PRIOR)
            self._correct(_rising(self._measured * ratios))

    def scaled(self, share: float) -> StepCost:
        """What is known now, times a share, to learn from there on."""
        return StepCost(dict(zip(self._points, (share * self._seconds).tolist(), strict=True)), self.seconds_per_key)

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
