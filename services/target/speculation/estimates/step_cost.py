"""The cost model of a step: seconds by the tokens in it and by the cached tokens that its attention reads.

Up to some number of tokens a step takes hardly longer than reading the weights; beyond, arithmetic counts. The bend
differs between machines, models and number formats, so the warm-up measures it. Between measured points the cost is
interpolated, beyond the last one extrapolated. Other processes start at the same time and share the machine later, so
every step corrects the two points between which it lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

DECAY = 0.99  # of the evidence, per measurement
PRIOR = 4.0  # measurements that a prior counts for: here the overall correction, at each point
MAX_EXCESS = 2.0  # a measurement above this many times its estimate counts as this many times: it was disturbed
_INTERVAL = 8  # steps between two corrections


class StepCost:
    """Seconds of a step.

    observed: steps that corrected the model
    """

    def __init__(self, seconds: Mapping[int, float], seconds_per_kv_token: float = 0.0) -> None:
        """seconds: measured, by tokens of the step. seconds_per_kv_token: of each cached token that a session has."""
        counts = sorted(seconds)
        self._tokens = np.array(counts, np.float64)
        self._measured = _rising(np.array([seconds[count] for count in counts]))
        self._ratios = [0.0] * len(counts)  # weighted sums of observed over measured seconds
        self._weights = [0.0] * len(counts)
        self.observed = 0
        self.seconds_per_kv_token = seconds_per_kv_token
        self._points = counts
        self._heights: list[float] = self._measured.tolist()
        self._correct(self._measured)

    def _correct(self, seconds: NDArray[np.float64]) -> None:
        self._seconds = seconds
        self._beyond = 0.0
        if len(seconds) > 1:
            self._beyond = float((seconds[-1] - seconds[-2]) / (self._tokens[-1] - self._tokens[-2]))
        # Seconds of one more token at each point, up to the next.
        self._slopes: list[float] = [*(np.diff(seconds) / np.diff(self._tokens)).tolist(), self._beyond]
        self._corrected: list[float] = seconds.tolist()

    def seconds(self, tokens: NDArray[np.integer], kv_tokens: int = 0) -> NDArray[np.float64]:
        """Seconds of n steps. tokens: [n], of each step. kv_tokens: of all sessions. Returns [n] float64."""
        inside = np.interp(tokens, self._tokens, self._seconds)
        beyond = np.maximum(tokens - self._tokens[-1], 0.0) * self._beyond
        seconds: NDArray[np.float64] = inside + beyond + kv_tokens * self.seconds_per_kv_token
        return seconds

    def step(self, tokens: float, kv_tokens: int, most: int = 1) -> tuple[float, float]:
        """Seconds of one step, and of the cheapest of the next `most` tokens that may be added to it.

        Every step asks, so this is plain Python.
        """
        at = bisect_right(self._points, tokens) - 1
        if at < 0:  # fewer tokens than were measured
            return self._corrected[0] + kv_tokens * self.seconds_per_kv_token, 0.0
        seconds = self._corrected[at] + (tokens - self._points[at]) * self._slopes[at]
        last = bisect_right(self._points, tokens + most - 1)
        return seconds + kv_tokens * self.seconds_per_kv_token, min(self._slopes[at:last])

    def prefill(self, tokens: int, decoding: int) -> float:
        """Seconds of a step's tokens beyond the decoding ones: of prompts, which are computed in any case."""
        return self.step(tokens, 0)[0] - self.step(decoding, 0)[0] if tokens > decoding else 0.0

    def observe(self, tokens: int, kv_tokens: int, seconds: float) -> None:
        """Add the time of a step. Steps of more tokens than were measured are prompts and are ignored."""
        points, last = self._points, len(self._points) - 1
        if tokens > points[last]:
            return
        below = max(bisect_right(points, tokens) - 1, 0)
        above = min(below + 1, last)
        share = (tokens - points[below]) / (points[above] - points[below]) if tokens > points[below] else 0.0
        expected, _ = self.step(tokens, kv_tokens)
        attention = kv_tokens * self.seconds_per_kv_token
        measured = self._heights[below] * (1.0 - share) + self._heights[above] * share + attention
        ratio = min(seconds, MAX_EXCESS * expected) / measured
        self._ratios = [one * DECAY for one in self._ratios]
        self._weights = [one * DECAY for one in self._weights]
        for point, weight in ((below, 1.0 - share), (above, share)):
            self._ratios[point] += weight * ratio
            self._weights[point] += weight
        self.observed += 1
        if self.observed % _INTERVAL == 0:
            overall = sum(self._ratios) / sum(self._weights)
            ratios = (np.array(self._ratios) + PRIOR * overall) / (np.array(self._weights) + PRIOR)
            self._correct(_rising(self._measured * ratios))

    def scaled(self, share: float) -> StepCost:
        """A model of its own that starts at a share of the present estimate."""
        seconds = dict(zip(self._points, (share * self._seconds).tolist(), strict=True))
        return StepCost(seconds, self.seconds_per_kv_token)

    def describe(self) -> str:
        """The measured points, for the log."""
        points = ", ".join(f"{int(n)}: {1e3 * s:.1f}" for n, s in zip(self._tokens, self._seconds, strict=True))
        return f"cost of a step in ms by tokens: {points}; {1e6 * self.seconds_per_kv_token:.2f} us per cached token"


def free() -> StepCost:
    """The model before anything is measured: further tokens cost nothing."""
    return StepCost({1: 1e-3})


def _rising(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """No step is cheaper for having more tokens: where it was measured so, the measurement was disturbed."""
    rising: NDArray[np.float64] = np.minimum.accumulate(seconds[::-1])[::-1]
    return rising
