"""The thread that learns: a bounded share of the time, and behind whatever else the machine does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_IDLE = 0.5  # seconds between two looks for something to learn
_NICENESS = 19


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
        if hasattr(os, "setpriority") and threading.current_thread() is self._thread:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread alone, on Linux
        try:
            ended = False
            while not ended:
                spent = self._turn()
                ended = self._rest(spent * (1 - self._share) / self._share if spent else _IDLE)
        except Exception:
            log.exception("learning has ended; the draft goes on as it is")
