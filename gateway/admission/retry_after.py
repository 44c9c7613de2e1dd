"""When to come back: seconds for `Retry-After`, by how fast requests have finished of late.

A place is free about every `gap` seconds. Who is refused is told of the next one that nobody was told of yet, so that
those who heed it do not all come back at once. It is not kept for them: whoever comes first gets a place.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

LONGEST = 60  # seconds that anybody is told to wait, and behind which requests are forgotten
_MOST = 256  # ends that are remembered

Clock = Callable[[], float]


class Pace:
    """Of requests that share a number of places."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0  # when the present time of work began
        self._ends: deque[float] = deque(maxlen=_MOST)
        self._promised = 0.0  # when the last place that was promised is free

    def begin(self) -> None:
        """A request has got a place."""
        if not self._running:
            self._since = self._promised = self._clock()
            self._ends.clear()
        self._running += 1

    def end(self, *, refused: bool = False) -> None:
        """It has left it. refused: it did nothing there."""
        self._running -= 1
        if not refused:
            self._ends.append(self._clock())

    def promise(self) -> int:
        """Seconds, 1 to 60, until a place should be free for one more who was refused."""
        now = self._clock()
        self._promised = min(max(self._promised, now) + self._gap(now), now + LONGEST)
        return bounded(self._promised - now)

    def _gap(self, now: float) -> float:
        """Seconds between two ends. While none has come, it takes as long again as it has taken."""
        since = max(self._since, now - LONGEST)
        if len(self._ends) == _MOST:
            since = max(since, self._ends[0])
        ends = sum(end > since for end in self._ends)
        return (now - since) / max(ends, 1)


def as_long_again(since: float) -> int:
    """Seconds to wait for what has been away since then (of time.monotonic): as long as it has been."""
    return bounded(time.monotonic() - since)


def bounded(seconds: float) -> int:
    """Whole seconds, 1 to 60."""
    return min(max(math.ceil(seconds), 1), LONGEST)
