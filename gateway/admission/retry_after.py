"""Seconds for `Retry-After`, estimated from the recent rate of finished requests.

An admission slot becomes free about every `gap` seconds. Each refused client gets the time of the next slot that no
other client was given yet, so that clients do not all retry at once. Slots are not reserved.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

MAX_SECONDS = 60  # longest value, and the window of the rate
_MAX_ENDS = 256  # ends of requests that are kept

Clock = Callable[[], float]


class RetryAfter:
    """The estimate for requests that share a number of admission slots."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0  # start of the present busy period
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)
        self._assigned = 0.0  # time of the last slot that was given to a refused client

    def begin(self) -> None:
        """A request was admitted."""
        if not self._running:
            self._since = self._assigned = self._clock()
            self._ends.clear()
        self._running += 1

    def end(self, *, refused: bool = False) -> None:
        """An admitted request ended. refused: a target refused it, so its end does not count for the rate."""
        self._running -= 1
        if not refused:
            self._ends.append(self._clock())

    def next(self) -> int:
        """Seconds, 1 to 60, until a slot should be free for one more refused client."""
        now = self._clock()
        self._assigned = min(max(self._assigned, now) + self.gap(now), now + MAX_SECONDS)
        return bounded(self._assigned - now)

    def gap(self, now: float) -> float:
        """Seconds between two ends of requests; before the first end, the time since the busy period began."""
        since = max(self._since, now - MAX_SECONDS)
        if len(self._ends) == _MAX_ENDS:
            since = max(since, self._ends[0])
        ends = sum(end > since for end in self._ends)
        return (now - since) / max(ends, 1)


def time_away(since: float) -> int:
    """Retry-After for a service that is away since `since` (time.monotonic): as long as it has been away."""
    return bounded(time.monotonic() - since)


def bounded(seconds: float) -> int:
    """Whole seconds, 1 to 60."""
    return min(max(math.ceil(seconds), 1), MAX_SECONDS)
