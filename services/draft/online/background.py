"""The thread that learns, for a bounded share of the time.

It has the priority of its process. With a lower one it could lose its core to another process while it holds Python's
lock, and the engine's thread would wait for both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_IDLE = 0.5  # seconds between two looks for something to learn


class Background:
    """Calls `turn` again and again, and rests after each call, so that it takes a share of the time and no more.

    If it fails, learning ends, and the service goes on with what it has.
    """

    def __init__(self, turn: Callable[[], float], share: float, rest: Callable[[float], bool] | None = None) -> None:
        """turn: returns the seconds that it took, 0 if there was nothing to do. share: above 0, below 1.

        rest: waits so many seconds; True ends it all. By default until `stop`.
        """
        self._turn, self._share = turn, share
        self._end = threading.Event()
        self._rest = rest or self._end.wait
        self._thread = threading.Thread(target=self.run, name="learner", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the present turn."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def run(self) -> None:
        """What the thread does."""
        try:
            ended = False
            while not ended:
                spent = self._turn()
                ended = self._rest(spent * (1 - self._share) / self._share if spent else _IDLE)
        except Exception:
            log.exception("learning has ended; the draft goes on as it is")
