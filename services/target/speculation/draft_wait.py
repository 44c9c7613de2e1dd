"""How long a step is held for proposals: until every session with a drafter has an answer to its last commit, within a
bound. A drafter further away than the bound hardly pays: a session whose answers usually take longer holds no step, and
neither do those whose answers add less than the time costs (estimates/wait_gain.py).

The first answer to a session takes longer, because the drafter reads the prompt first: on the target's cores it can do
so only while the target waits. So a step may be held for it once, for as long as the target itself took to read that
prompt. It is not where most sessions of the step have answers already, and not after several such waits in vain: the
drafter may leave out sessions of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.estimates.wait_gain import WaitGain

_MAX_WAIT = 0.3  # seconds that a step is held at most, and no longer than ...
_MAX_WAIT_STEPS = 2  # ... this many steps take
MEASURING_WAIT = 10.0  # seconds, in which a draft reads a long prompt; for drafters that are measured
_MAX_FIRST_WAIT = 2.0  # seconds for first answers
_MAX_VAIN = 2  # consecutive waits for first answers in vain
_MAX_MISSES = 3  # consecutive waits in vain after which a session is no longer waited for


def longest_wait(step_seconds: float) -> float:
    """Seconds that a step is held at most for drafters that have answered before. step_seconds: of a usual step."""
    return min(_MAX_WAIT_STEPS * step_seconds, _MAX_WAIT)


class DraftWait:
    """Decides for one engine; knows sessions by id.

    has_drafter: a drafter has answered since the start
    reads_ahead: a drafter has answered a session before its first token: it reads prompts while the target does
    latency: how long answers take
    gain: whether waiting pays for sessions that have draft tokens left
    longest: seconds for which the present step may be held in all
    reads: the present step is held for first answers
    """

    def __init__(self, clock: Callable[[], float], longest: float | None = None) -> None:
        """longest: seconds that a step is held at most, also for a first answer, as long as one may come; by default
        the time of two steps."""
        self._clock = clock
        self._longest = longest
        self.latency = AnswerLatency()
        self.gain = WaitGain(self.latency)
        self.longest, self.reads = 0.0, False
        self.has_drafter = self.reads_ahead = False
        self._unanswered = False  # a step was held for the longest time before any drafter had ever answered
        self._awaited: set[int] = set()
        self._misses: dict[int, int] = {}  # by session: waits in vain since its last fresh answer
        self._drafted: set[int] = set()
        self._vain = 0  # consecutive waits for first answers that had none
        self._deadline = clock()

    @property
    def now(self) -> float:
        """The time by this wait's clock."""
        return self._clock()

    @property
    def remaining(self) -> float:
        """Seconds that the next step may still be held; 0 if it should start now."""
        if not self._awaited:
            return 0.0
        return max(0.0, self._deadline - self._clock())

    def begin(self, now: float) -> None:
        """A step begins."""
        expired = now >= self._deadline
        self._unanswered = not self.has_drafter and (self._unanswered or bool(self._awaited and expired))
        if expired:
            self._count_misses()
        self._awaited.clear()

    def _count_misses(self) -> None:
        """The deadline has passed for the awaited sessions: a drafter may be gone, or have left a session out."""
        self._vain += not self._awaited <= self._drafted
        for session_id in self._awaited:
            self._misses[session_id] = self._misses.get(session_id, 0) + 1
            if self._misses[session_id] >= _MAX_MISSES:
                self._drafted.discard(session_id)

    def received(self, session_id: int, *, fresh: bool, length: int = 0, useful: bool = True) -> None:
        """A proposal, or an empty answer, has come. length: tokens that its drafter knew; fresh: it knew all.

        useful: it holds draft tokens
        """
        self.has_drafter = True
        if session_id not in self._drafted:  # its first answer took the time of the prompt, too
            self._drafted.add(session_id)
            self._vain = 0
        else:
            self.latency.answered(session_id, length, self._clock(), useful=useful)
        if fresh:
            self.gain.answered(session_id)
            self._awaited.discard(session_id)
            self._misses.pop(session_id, None)

    def asked(self, lengths: Mapping[int, int], trees: Collection[int] = ()) -> None:
        """Commits ask for draft tokens, which the next step waits for or not. lengths: of their sessions, with them.

        trees: sessions that have draft tokens left
        """
        now, held = self._clock(), self._awaited if self.remaining > 0.0 else ()
        for one in self._drafted & lengths.keys():
            self.latency.asked(one, lengths[one], now, held=one in held, bare=one not in trees)

    def weigh(self, promised: Mapping[int, float | None], step_seconds: float) -> None:
        """Hold the next step only for sessions where that pays; the others do not count as waited for in vain.

        promised, step_seconds: as of WaitGain
        """
        self._awaited &= self.gain.worth({one: promised.get(one) for one in self._awaited}, step_seconds)

    def drafts_for(self, session_id: int) -> bool:
        """True if a drafter answers for the session."""
        return session_id in self._drafted

    def any_of(self, session_ids: Collection[int]) -> set[int]:
        """Those of some sessions that a drafter answers for."""
        return self._drafted.intersection(session_ids)

    def closed(self, session_id: int) -> None:
        """A session has ended."""
        self._drafted.discard(session_id)
        self._awaited.discard(session_id)
        self._misses.pop(session_id, None)
        self.latency.closed(session_id)

    def end(
        self,
        now: float,
        wanted: Collection[int],
        step_seconds: float,
        *,
        hold: bool,
        tries: bool = False,
        reading: Mapping[int, float] | None = None,
    ) -> None:
        """A step has ended. wanted: sessions whose draft tokens are wanted next. step_seconds: of a usual step.

        hold: the mode waits for proposals. tries: a trial of it begins, for which answers are measured. reading:
        seconds in which drafters read sessions that have no answer yet
        """
        longest, reads = longest_wait(step_seconds), False
        near = wanted if tries else [one for one in wanted if self.latency.of(one).held_seconds <= longest]
        awaited = self.any_of(near)
        if self.has_drafter and reading and self._vain < _MAX_VAIN and 2 * len(reading) > len(wanted):
            unread = {one for one in reading if one not in self._misses}
            longest = max(longest, min(sum(reading[one] for one in unread), _MAX_FIRST_WAIT))
            awaited |= unread
            reads = bool(unread)
        if self._longest is not None and not self._unanswered:
            awaited = {one for one in wanted if self._misses.get(one, 0) < _MAX_MISSES}
        self.longest, self.reads = 0.0, hold and reads
        if hold and awaited:
            self._awaited, self.longest = awaited, self._longest or longest
            self._deadline = now + self.longest
