"""The training thread, which takes a bounded share of the time.

It has the priority of its process. With a lower one it could lose its core while it holds Python's lock, and the engine
would wait for both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_IDLE = 0.5  # seconds until the next call when there was nothing to do


class Background:
    """Calls `run_once` repeatedly and pauses after each call, so that the calls take at most a share of the time.

    After an exception training ends, and the service goes on with its present weights.
    """

    def __init__(
        self, run_once: Callable[[], float], share: float, rest: Callable[[float], bool] | None = None
    ) -> None:
        """turn: returns the seconds that it took, 0 if there was nothing to do. share: between 0 and 1.

        rest: waits for a number of seconds, and returns True to end the thread; by default until `stop`.
        """
        self._run_once, self._share = run_once, share
        self._end = threading.Event()
        self._rest = rest or self._end.wait
        self._thread = threading.Thread(target=self.run, name="learner", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the present call."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def run(self) -> None:
        """The body of the thread."""
        try:
            finished = False
            while not finished:
                spent = self._run_once()
                finished = self._rest(spent * (1 - self._share) / self._share if spent else _IDLE)
        except Exception:
            log.exception("online training has ended; the draft keeps its present weights")
