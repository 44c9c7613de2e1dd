"""Work for clients in turns, in the order in which it became due: pieces of text, and in between new requests.

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
_PER_REQUEST = 8  # pieces of text for each new request, while both wait; a request takes about as long as 20
_WEIGHT = 0.05  # of the newest piece of text, or request, in the mean delay
_TOLERATED = 0.03  # seconds of delay that a burst of frames causes in a gateway that keeps up
_SHARE = 0.25  # of the delay: the time between two frames of a stream
_MAX_SPACING = 0.25  # seconds
MAX_DELAY = 10.0  # seconds of delay beyond which new requests are refused


class Turns:
    """One for all models of a process. Lives in one event loop. delay: of the last work, in seconds."""

    def __init__(self) -> None:
        self.delay = 0.0
        self._texts: deque[tuple[float, Callable[[], object]]] = deque()
        self._requests: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._left = _PER_TURN  # pieces of text in this turn
        self._since_request = 0  # pieces of text since the last request
        self._turning = False

    def add(self, text: Callable[[], object]) -> None:
        """Send a piece of text in its turn, which may be at once."""
        self._turn_later()
        if self._texts or not self._left:
            self._texts.append((time.perf_counter(), text))
        else:
            self._send(text, 0.0)

    async def request(self) -> None:
        """Wait for the turn of a new request, which it has for itself.

        Raises Overloaded if others have waited for too long already.
        """
        now = time.perf_counter()
        late = max((now - queue[0][0] for queue in (self._texts, self._requests) if queue), default=0.0)
        if late > MAX_DELAY:
            raise Overloaded(
                f"the gateway's processor is busy: answers come {late:.1f} s late; retry later, or start more gateways",
                retry_after=bounded(late),
            )
        self._turn_later()
        if self._texts or self._requests or not self._left:
            self._requests.append((now, turn := asyncio.get_running_loop().create_future()))
            await turn
        else:
            self._left = self._since_request = 0

    def spacing(self) -> float:
        """Seconds between two frames of a stream, so that the gateway keeps up; 0 if it does."""
        return min(_SHARE * self.delay, _MAX_SPACING) if self.delay > _TOLERATED else 0.0

    def _turn_later(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._left, self._turning = _PER_TURN, False
        now = time.perf_counter()
        while self._requests and self._requests[0][1].done():  # its client has gone
            self._requests.popleft()
        if self._requests and (not self._texts or self._since_request >= _PER_REQUEST):
            self._left = self._since_request = 0
            since, turn = self._requests.popleft()
            self._waited(now - since)
            turn.set_result(None)
        while self._texts and self._left:
            since, text = self._texts.popleft()
            self._send(text, now - since)
        if self._texts or self._requests or not self._left:
            self._turn_later()

    def _send(self, text: Callable[[], object], late: float) -> None:
        self._left -= 1
        self._since_request += 1
        self._waited(late)
        text()

    def _waited(self, seconds: float) -> None:
        self.delay += _WEIGHT * (seconds - self.delay)
