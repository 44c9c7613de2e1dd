"""Whether, and how long, a step waits for the hints to the last one's commits: only as far as measurements say it pays.

A drafter that answers within a millisecond makes a step of thirty worth more; one that needs as long as the step does
not. So two ways of working are measured against one another, in turns of some steps: going at once, and waiting until
every session that is drafted for has had an answer, at most a small part of a step. The one that commits more tokens a
session and second is used; now and then the other has a turn, because texts, drafters and load change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

TURN = 16  # steps
_TURNS_BETWEEN_PROBES = 16
_KEPT = 0.9  # what remains of a measurement at the next turn of its kind
_PART_OF_STEP = 0.2
_LONGEST = 0.02  # seconds


@dataclass
class _Measured:
    """Tokens a session, and seconds, of one way of working; older turns count less."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a session and second; without a measurement, as good as can be."""
        return self.tokens / self.seconds if self.seconds else float("inf")

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = self.tokens * _KEPT + tokens
        self.seconds = self.seconds * _KEPT + seconds


class Patience:
    """Decides for one engine; knows sessions by id."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._measured = {True: _Measured(), False: _Measured()}
        self.waiting = True  # the way of the present turn
        self._turn = [0.0, 0.0]  # tokens a session, seconds
        self._steps = self._turns = 0
        self._idle_steps = 0  # since anything was verified
        self._probing = False
        self._step_seconds = 0.0
        self._awaited: set[int] = set()
        self._drafted: set[int] = set()
        self._ended = self._deadline = clock()

    @property
    def remaining(self) -> float:
        """Seconds that the next step may still be held; 0 if it should go now."""
        if not self._awaited:
            return 0.0
        return max(0.0, self._deadline - self._clock())

    def begin(self) -> None:
        """A step begins."""
        self._awaited.clear()

    def answered(self, session_id: int, fresh: bool) -> None:
        """A hint has come, or word that there is none. fresh: its drafter knew of the last commit."""
        self._drafted.add(session_id)
        if fresh:
            self._awaited.discard(session_id)

    def drafted(self, session_id: int) -> bool:
        """True if somebody drafts for the session."""
        return session_id in self._drafted

    def forget(self, session_id: int) -> None:
        """A session has ended."""
        self._drafted.discard(session_id)
        self._awaited.discard(session_id)

    def end(self, sessions: Collection[int], count: int, tokens: int, verified: bool = True) -> None:
        """A step has ended that committed tokens in `count` sessions. sessions: those of them whose hints are wanted.

        verified: whether any hint was worth its rows.
        """
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        drafted = self._drafted.intersection(sessions)
        if drafted and tokens:
            self._measure(tokens / count, seconds)
        self._idle_steps = 0 if verified else self._idle_steps + 1
        # Hints that the budget leaves aside are not worth a wait, but when it is tried whether waiting makes them so.
        if drafted and self.waiting and (self._probing or self._idle_steps < 2 * TURN):
            self._awaited = drafted
            self._deadline = now + min(_PART_OF_STEP * self._step_seconds, _LONGEST)

    def _measure(self, tokens: float, seconds: float) -> None:
        # The first step after a pause is long; a step that waited is hardly longer than one that did not.
        if self._step_seconds and seconds > 4 * self._step_seconds:
            seconds = self._step_seconds
        self._step_seconds = 0.9 * self._step_seconds + 0.1 * seconds if self._step_seconds else seconds
        self._turn[0] += tokens
        self._turn[1] += seconds
        self._steps += 1
        if self._steps == TURN:
            self._measured[self.waiting].add(*self._turn)
            self._turn, self._steps = [0.0, 0.0], 0
            self._turns += 1
            best = self._measured[True].rate >= self._measured[False].rate
            self._probing = self._turns % _TURNS_BETWEEN_PROBES == 0
            self.waiting = best != self._probing
