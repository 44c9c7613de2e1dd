"""Whether hints are asked for, and how long a step waits for them: only as far as measurements say it pays.

A drafter that answers within a millisecond makes a step of thirty worth more; one that needs as long as the step does
not; and one that shares the machine with the target may cost more than its hints bring. So three ways of working are
measured against one another, in turns of some steps, at each load by itself:

    WAIT   until every session that is drafted for has had an answer, at most as long as a step takes
    GO     with the hints that lie there
    PLAIN  without hints; drafters are told that none are wanted

The one that commits most tokens a session and second is used. Now and then the others have a turn, because texts,
drafters and load change; what is far behind, ever more seldom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

TURN = 16  # steps that a turn is measured; the first turns at a load are shorter
_FIRST_TURN = 4
_SETTLING = 2  # steps at the beginning of a turn that are not measured: drafters have yet to be told
_SOONEST, _LATEST = 16, 128  # turns after which a way that is not the best is tried again
_LEAD = 1.02  # that others must have before PLAIN: what is gained by less may be noise, and costs drafters their time
_FAR_BEHIND = 0.9  # of the best one's rate
_UNANSWERED = 4  # turns after which hints that have not come at all are a measure, too
_KEPT = 0.9  # what remains of a measurement with each turn after it
_KEPT_LEAST = 0.3
_LONGEST = 0.05  # seconds that a step is held at most, and never longer than a step takes


class Way(Enum):
    """A way of working."""

    WAIT = auto()
    GO = auto()
    PLAIN = auto()


HINTED = (Way.WAIT, Way.GO)
ALWAYS = (Way.WAIT,)
AS_LONG_AS_IT_TAKES = 10.0  # seconds, in which a long prompt is read; for drafters that are measured, not to help


@dataclass
class _Measured:
    """Tokens a session, and seconds, of one way of working; older turns count less."""

    tokens: float = 0.0
    seconds: float = 0.0
    turn: int = 0  # when it was measured last
    due: int = 0  # when it is tried again, if it is not the best
    pause: int = _SOONEST

    @property
    def rate(self) -> float:
        """Tokens a session and second; without a measurement, as good as can be."""
        return self.tokens / self.seconds if self.seconds else float("inf")

    def add(self, turn: int, tokens: float, seconds: float) -> None:
        """Take in a turn."""
        kept = max(_KEPT ** (turn - self.turn), _KEPT_LEAST)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds
        self.turn = turn


class _Contest:
    """The ways at one load."""

    def __init__(self, ways: Sequence[Way], first: Way) -> None:
        self._measured = {way: _Measured() for way in ways}
        self._turns = 0
        self.way = first  # of the present turn

    @property
    def steps(self) -> int:
        """Length of the present turn: at first short ones, so that what does not pay is soon known not to."""
        return int(min(_FIRST_TURN << self._turns // len(self._measured), TURN))

    def end_turn(self, tokens: float, seconds: float) -> None:
        """A turn has ended; choose the next one's way."""
        self._turns += 1
        present = self._measured[self.way]
        present.add(self._turns, tokens, seconds)
        best = max(self._measured, key=lambda way: self._measured[way].rate * (_LEAD if way is Way.PLAIN else 1.0))
        if self.way is best or present.rate >= _FAR_BEHIND * self._measured[best].rate:
            present.pause = _SOONEST
        else:
            present.pause = min(2 * present.pause, _LATEST)
        present.due = self._turns + present.pause
        due = [way for way, measured in self._measured.items() if way is not best and measured.due <= self._turns]
        self.way = due[0] if due else best


class Patience:
    """Decides for one engine; knows sessions by id."""

    def __init__(
        self,
        ways: Sequence[Way] = tuple(Way),
        clock: Callable[[], float] = time.perf_counter,
        longest: float | None = None,
    ) -> None:
        """longest: seconds that a step is held at most, also for a first answer; by default as long as a step takes."""
        self._clock = clock
        self._ways = ways
        self._longest = longest
        self._contests: dict[int, _Contest] = {}  # by the number of bits of the number of sessions
        self._load = 0
        self._begin_turn()
        self._step_seconds = 0.0
        self._has_drafter = False
        self._awaited: set[int] = set()
        self._drafted: set[int] = set()
        self._computing = 0.0  # seconds of a step, waits left out
        self._ended = self._began = self._deadline = clock()

    @property
    def way(self) -> Way:
        """How to work at present."""
        contest = self._contests.get(self._load)
        return contest.way if contest is not None else self._ways[0]

    @property
    def remaining(self) -> float:
        """Seconds that the next step may still be held; 0 if it should go now."""
        if not self._awaited:
            return 0.0
        return max(0.0, self._deadline - self._clock())

    def begin(self) -> None:
        """A step begins."""
        self._awaited.clear()
        self._began = self._clock()

    def answered(self, session_id: int, fresh: bool) -> None:
        """A hint has come, or word that there is none. fresh: its drafter knew of the last commit."""
        self._has_drafter = True
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

    def end(self, wanted: Collection[int], count: int, tokens: int, *, usual: bool = True) -> None:
        """A step has ended that committed tokens in `count` sessions.

        wanted: those of them whose hints are wanted. usual: False for a step that says little, as prompts were in it.
        """
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        computing = now - self._began
        self._computing += (0.2 if self._computing else 1.0) * (computing - self._computing)
        drafted = self._drafted.intersection(wanted)
        if self._has_drafter and count and usual and self._judges(bool(drafted)):
            self._measure(count, tokens / count, seconds)
        awaited = drafted if self._longest is None else set(wanted)
        if self.way is Way.WAIT and awaited:
            self._awaited = awaited
            self._deadline = now + (self._longest or min(self._computing, _LONGEST))

    def _judges(self, drafted: bool) -> bool:
        # A drafter that has not answered a session yet may have its prompt to read: that is no measure of its hints,
        # unless it goes on like that.
        if drafted or self.way is Way.PLAIN:
            return True
        self._unanswered += 1
        return self._unanswered > _UNANSWERED * TURN

    def _measure(self, count: int, tokens: float, seconds: float) -> None:
        load = count.bit_length()
        if load != self._load:
            way, self._load, self._step_seconds = self.way, load, 0.0
            self._begin_turn()
            if load not in self._contests:
                self._contests[load] = _Contest(self._ways, first=way)
            return
        # The first step after a pause is long; a step that waited is hardly longer than one that did not.
        if self._step_seconds and seconds > 4 * self._step_seconds:
            seconds = self._step_seconds
        self._step_seconds = 0.9 * self._step_seconds + 0.1 * seconds if self._step_seconds else seconds
        self._steps += 1
        if self._steps <= 0:
            return
        self._turn[0] += tokens
        self._turn[1] += seconds
        contest = self._contests[load]
        if self._steps >= contest.steps:
            before = contest.way
            contest.end_turn(*self._turn)
            self._begin_turn(settling=_SETTLING if contest.way is not before else 0)

    def _begin_turn(self, settling: int = 0) -> None:
        self._turn = [0.0, 0.0]  # tokens a session, seconds
        self._steps = -settling
        self._unanswered = 0  # steps of the turn whose sessions no drafter has answered
