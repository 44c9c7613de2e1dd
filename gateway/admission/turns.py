"""Work for clients in turns, in the order in which it became due: pieces of text, and new requests.

The event loop reads and relays the services' frames between two turns. So a gateway with more work than processor time
sends its clients fewer and longer pieces of text, while commits still reach the drafts, and proposals the targets. If
that is not enough, the streams to the services carry fewer and larger frames.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from gateway.admission.retry_after import bounded
from outrider.errors import Overloaded

_PER_TURN = 4  # pieces of text, before the event loop reads the streams again
_WEIGHT = 0.05  # of the newest piece of work in the mean delay
_TOLERATED = 0.03  # seconds of delay that a burst of frames causes in a gateway that keeps up
_SHARE = 0.25  # of the delay: the time between two frames of a stream
_MAX_SPACING = 0.25  # seconds
MAX_DELAY = 5.0  # seconds of delay beyond which new requests are refused


class Turns:
    """One for all models of a process. Lives in one event loop. delay: mean of the last pieces of work, in seconds."""

    def __init__(self) -> None:
        self.delay = 0.0
        self._due: deque[tuple[float, Callable[[], object], int]] = deque()
        self._left = _PER_TURN  # of this turn
        self._turning = False

    def add(self, work: Callable[[], object], size: int = 1) -> None:
        """Do a piece of work in its turn, which may be at once. size: 1 for a piece of text."""
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._due or self._left <= 0:
            self._due.append((time.perf_counter(), work, size))
        else:
            self._do(work, size, 0.0)

    async def request(self) -> None:
        """Wait for the turn of a new request, which it has for itself.

        Raises Overloaded if others have waited for too long already.
        """
        late = time.perf_counter() - self._due[0][0] if self._due else 0.0
        if late > MAX_DELAY:
            raise Overloaded(
                f"the gateway's processor is busy: answers come {late:.1f} s late; retry later, or start more gateways",
                retry_after=bounded(late),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.add(lambda: turn.done() or turn.set_result(None), _PER_TURN)
        if not turn.done():
            await turn

    def spacing(self) -> float:
        """Seconds between two frames of a stream, so that the gateway keeps up; 0 if it does."""
        return min(_SHARE * self.delay, _MAX_SPACING) if self.delay > _TOLERATED else 0.0

    def _turn(self) -> None:
        self._left, self._turning = _PER_TURN, False
        now = time.perf_counter()
        while self._due and self._left > 0:
            since, work, size = self._due.popleft()
            self._do(work, size, now - since)
        if self._due:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _do(self, work: Callable[[], object], size: int, late: float) -> None:
        self._left -= size
        self.delay += _WEIGHT * (late - self.delay)
        work()
