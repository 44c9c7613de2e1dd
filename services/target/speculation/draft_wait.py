"""Whether hints are asked for, and how long a step waits for them: only as far as measurements say it pays.

A drafter that answers within a millisecond makes a step of thirty worth more; one that needs as long as the step does
not; and one that shares the machine with the target may cost more than its hints bring. So the ways of working are
measured against one another, in turns of some steps, at each load by itself (mode_selector.py):

    WAIT   until every session that is drafted for has had an answer, at most as long as two steps take
    GO     with the hints that lie there
    PLAIN  without hints; drafters are told that none are wanted. What texts repeat may be verified (sources/)
    SELF   so, too, and with drafts from a copy of the target's weights, where it has one (sources/base.py)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from services.target.speculation.mode_selector import DRAFT_MODES, TURN, ModeSelector, PrefillCost, SpeculationMode

# Steps at the beginning of a turn that are not measured: drafters have yet to be told, or do first what they do once.
_SETTLING = 2
_UNANSWERED = 2  # turns after which hints that have not come at all are a measure, too
_HELD_UP = 4.0  # times a way's usual step: what takes longer counts as one
_MISSED = 3  # waits in vain, one after another, after which a session is no longer waited for
_MANY = 2  # as of `_contests`: three sessions and more
LONGEST = 0.05  # seconds that a step is held at most, and no longer than ...
_HELD_STEPS = 2  # ... so many steps take: a draft that is further away hardly pays, and trying it costs more

SERVICE_MODES = (*DRAFT_MODES, SpeculationMode.NONE)  # all ways of a target that has no drafts of its own
ALWAYS = (SpeculationMode.WAIT_FOR_DRAFT,)
AS_LONG_AS_IT_TAKES = 10.0  # seconds, in which a long prompt is read; for drafters that are measured, not to help


class DraftWait:
    """Decides for one engine; knows sessions by id."""

    def __init__(
        self,
        ways: Sequence[SpeculationMode] = SERVICE_MODES,
        clock: Callable[[], float] = time.perf_counter,
        longest: float | None = None,
        dear: Callable[[], bool] = lambda: False,
    ) -> None:
        """ways: those that are weighed; the first one begins.

        longest: seconds that a step is held at most, also for a first answer, as long as one may come; by default the
        time of two steps.
        dear: says whether hints are so dear that few sessions, too, begin without, as many do.
        """
        self._clock = clock
        self._ways = ways
        self._own_ways = [way for way in ways if way not in DRAFT_MODES]  # as long as there is no drafter
        self._first = ways[0]
        self._longest = longest
        self._dear = dear
        self._contests: dict[int, ModeSelector] = {}  # by the number of sessions: 1, 2, 3 to 5, 6 to 11, and so on
        self._prompts = PrefillCost()
        self._load = self._coming = -1  # logarithms of sessions: of those that are measured, and that are here
        self._begin_turn()
        self._usual: dict[SpeculationMode, float] = {}  # seconds of a measured step at this load
        self._has_drafter = False
        self._silent = False  # a step was held for the longest time, and nobody has ever answered
        self._awaited: set[int] = set()
        self._missed: dict[int, int] = {}  # by session: waits in vain since its last fresh answer
        self._drafted: set[int] = set()
        self._computing = 0.0  # seconds of a step without prompts, waits left out ...
        self._committing = 1.0  # ... and the tokens of each session that come of it
        self._ended = self._began = self._deadline = clock()

    @property
    def way(self) -> SpeculationMode:
        """How to work at present."""
        contest = self._contests.get(self._load)
        return contest.way if contest is not None else self._first

    @property
    def remaining(self) -> float:
        """Seconds that the next step may still be held; 0 if it should go now."""
        if not self._awaited:
            return 0.0
        return max(0.0, self._deadline - self._clock())

    def begin(self, sessions: int = 0) -> None:
        """A step begins. sessions: that are here, those that have still to read their prompts included.

        They will all want tokens soon, so it is their load that is met: what they have to read is read the better way.
        """
        self._began = self._clock()
        self._silent = not self._has_drafter and (self._silent or bool(self._awaited and self._began >= self._deadline))
        if self._began >= self._deadline:
            self._count_missed()
        self._awaited.clear()
        self._coming = _load(sessions)
        if self._weighs and self._coming > self._load:
            self._meet(self._coming)

    def _count_missed(self) -> None:
        """The time is over in which answers were waited for: a drafter may be gone, or have left a session out."""
        for session_id in self._awaited:
            self._missed[session_id] = self._missed.get(session_id, 0) + 1
            if self._missed[session_id] >= _MISSED:
                self._drafted.discard(session_id)

    @property
    def _weighs(self) -> bool:
        """True if there is more than one way."""
        return self._has_drafter or len(self._own_ways) > 1

    def answered(self, session_id: int, fresh: bool) -> None:
        """A hint has come, or word that there is none. fresh: its drafter knew of the last commit."""
        if not self._has_drafter:
            self._has_drafter = True
            self._contests, self._load = {}, -1  # which knew nothing of hints
        self._drafted.add(session_id)
        if fresh:
            self._awaited.discard(session_id)
            self._missed.pop(session_id, None)

    @property
    def unwanted(self) -> bool:
        """True if drafters are told that no hints are wanted. Until one answers, all are asked."""
        return self._has_drafter and self.way not in DRAFT_MODES

    @property
    def unhinted(self) -> bool:
        """True if nobody drafts, or drafters have heard for some steps that nothing is wanted."""
        return not self._has_drafter or (self.unwanted and self._steps >= 0)

    def drafted(self, session_id: int) -> bool:
        """True if somebody drafts for the session."""
        return session_id in self._drafted

    def forget(self, session_id: int) -> None:
        """A session has ended."""
        self._drafted.discard(session_id)
        self._awaited.discard(session_id)
        self._missed.pop(session_id, None)

    def end(self, wanted: Collection[int], count: int, tokens: int, *, prompts: int = 0, steps: int = 1) -> None:
        """A step has ended, or several at once, that committed tokens in `count` sessions.

        wanted: those of them whose hints are wanted. prompts: rows of prompts in it.
        """
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        computing = now - self._began
        drafted = self._drafted.intersection(wanted)
        if self._weighs:
            self._prompts.committed(tokens)
            self._account(count, tokens, prompts, computing, seconds - computing)
            load = _load(count)
            if count and (load > self._load or (load < self._load and not prompts and self._coming < self._load)):
                self._meet(load)
            elif count and not prompts and self._judges(bool(drafted)):
                self._measure(count, tokens / count, seconds, steps)
        if count and not prompts:
            new = 0.2 if self._computing else 1.0
            self._computing += new * (computing / steps - self._computing)
            self._committing += new * (tokens / count / steps - self._committing)
        awaited = drafted
        if self._longest is not None and not self._silent:
            awaited = {one for one in wanted if self._missed.get(one, 0) < _MISSED}
        if self.way is SpeculationMode.WAIT_FOR_DRAFT and awaited:
            self._awaited = awaited
            self._deadline = now + (self._longest or min(_HELD_STEPS * (self._computing or computing), LONGEST))

    def _account(self, count: int, tokens: int, prompts: int, computing: float, waited: float) -> None:
        """All steps, measured or not, tell what trials cost and when the next are due. computing, waited: seconds."""
        contest = self._contests.get(self._load)
        if prompts:
            # Beside prompts there may be no drafts, so it is the step's tokens that take the time of others.
            others = self._computing * tokens / (count * self._committing) if tokens else 0.0
            self._prompts.read(self.way, prompts, max(0.0, computing - others))
            if contest is not None:
                contest.read(computing)
        elif count and contest is not None:
            contest.spend(tokens / count, computing + min(waited, LONGEST))

    def _judges(self, drafted: bool) -> bool:
        # A drafter that has not answered a session yet may have its prompt to read: that is no measure of its hints,
        # unless it goes on like that.
        if drafted or self.way not in DRAFT_MODES:
            return True
        self._unanswered += 1
        return self._unanswered > _UNANSWERED * TURN

    def _meet(self, load: int) -> None:
        """Go on at another load."""
        way, self._load, self._usual = self.way, load, {}
        new = load not in self._contests
        self._begin_turn(settling=_SETTLING if new else 0)
        if new:
            known = max((known for known in self._contests if known < load), default=-1)
            fewer, many = self._contests.get(known), load >= _MANY or self._dear()
            ways = self._ways if self._has_drafter else self._own_ways
            self._contests[load] = ModeSelector(ways, way, self._prompts, fewer, load - known, many=many)

    def _measure(self, count: int, tokens: float, seconds: float, steps: int) -> None:
        # The first step after a pause is long. A long chain is, too, so that each way has its own measure.
        usual = self._usual.get(self.way, seconds / steps)
        self._usual[self.way] = usual + 0.1 * (min(seconds / steps, _HELD_UP * usual) - usual)
        if seconds > _HELD_UP * steps * usual:
            seconds = steps * usual
        self._steps += steps
        if self._steps <= 0:
            return
        self._turn[0] += tokens
        self._turn[1] += seconds
        contest = self._contests[self._load]
        if self._steps >= contest.steps:
            before = contest.way
            contest.end_turn(*self._turn, sessions=count, steps=self._steps)
            self._begin_turn(settling=_SETTLING if contest.way is not before else 0)

    def _begin_turn(self, settling: int = 0) -> None:
        self._turn = [0.0, 0.0]  # tokens a session, seconds
        self._steps = -settling
        self._unanswered = 0  # steps of the turn whose sessions no drafter has answered


def _load(sessions: int) -> int:
    """Loads are told apart by the logarithm of their sessions; -1 is none."""
    return round(math.log2(sessions)) if sessions else -1
