"""Waits between attempts that fail."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Waits that double up to the longest, in seconds.

    reset_after: duration of a success after which waits begin again. jitter: largest random change of a wait, as a
    fraction of it, so that processes that failed together do not retry together
    """

    first: float = 0.5
    longest: float = 10.0
    reset_after: float = 30.0
    jitter: float = 0.0

    def waits(self) -> Iterator[float]:
        """The waits, without end."""
        wait = self.first
        while True:
            yield wait * random.uniform(1 - self.jitter, 1 + self.jitter)
            wait = min(2 * wait, self.longest)
