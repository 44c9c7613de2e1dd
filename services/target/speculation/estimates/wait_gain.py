"""For which sessions a step should wait until the answers to their last commits have come.

Waiting until the answer of one session is there pays if the tokens that its answer adds, and the answers of sessions
whose drafts are nearer, exceed those that the target commits in the time:

    sum over awaited sessions of what their answers add > throughput * seconds to the last of these answers

What survives a commit was drafted ahead, from a drafter's own states; the answer is drafted from the commit itself, and
usually promises more: it adds the usual acceptance less what the present tree promises. Without a tree it adds the
usual acceptance less that of the target's own draft tokens, which would be verified instead, and only the share of it
that the answer does not bring to a later step where none waits. Either counts as often as answers of the session hold
draft tokens at all.

All of these are measured, so the choice follows each link's delay, the drafter's time, the length of a step and the
text. Where usual acceptance has not been measured for a while because no step waited, it counts as one token at least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.target.speculation.estimates.answer_latency import PAUSE, AnswerLatency
from services.target.speculation.estimates.average import SLOW_WEIGHT, Average
from services.target.speculation.estimates.in_time import share_in_time

_LEAST = 8  # answers, or steps, before a measurement counts
_STALE = 100  # times an answer's latency, after which a measurement of the acceptance is old: 1 % is spent on a new one
_HOPED = 1.0  # draft tokens that an answer is then hoped to bring


class WaitGain:
    """Measures one engine's answers; knows sessions by id."""

    def __init__(self, latency: AnswerLatency) -> None:
        self._latency = latency
        self._accepted, self._own = Average(SLOW_WEIGHT), Average(SLOW_WEIGHT)
        self._tokens, self._seconds = Average(SLOW_WEIGHT), Average(SLOW_WEIGHT)
        self._answered: set[int] = set()  # sessions whose next step has an answer to the last commit
        self._last: float | None = None
        self._measured = 0.0  # when usual acceptance was

    def answered(self, session_id: int) -> None:
        """An answer to the last commit has come."""
        self._answered.add(session_id)

    def committed(self, now: float, accepted: Mapping[int, int], tokens: int, own: Iterable[int] = ()) -> None:
        """A step without prompts has ended.

        accepted: draft tokens of each session that had a service's; own: of each other session; tokens: of all, bonus
        included
        """
        for count in own:
            self._own.add(count)
        for session_id in self._answered & accepted.keys():
            self._accepted.add(accepted[session_id])
            self._measured = now
        if self._last is not None and now - self._last < PAUSE:
            self._tokens.add(tokens)
            self._seconds.add(now - self._last)
        self._last = now
        self._answered.clear()

    def worth(self, promised: Mapping[int, float | None], step: float) -> set[int]:
        """Those of some sessions for which the next step should wait: all if too little is known.

        promised: draft tokens that a session's present tree promises; None without one. step: seconds of a usual step
        """
        if min(self._latency.count, self._accepted.count, self._seconds.count) < _LEAST:
            return set(promised)
        throughput = self._tokens.value / self._seconds.value
        nearest = sorted(promised, key=lambda one: self._latency.of(one).held_seconds)
        best, most, added = 0, 0.0, 0.0
        for count, session_id in enumerate(nearest, 1):
            added += self._added(session_id, promised[session_id], step)
            gain = added - throughput * self._latency.of(session_id).held_seconds
            if gain > most:
                best, most = count, gain
        return set(nearest[:best])

    def _added(self, session_id: int, promised: float | None, step: float) -> float:
        """Tokens that waiting for a session's answer adds to the next step."""
        answers, accepted = self._latency.of(session_id), self._accepted.value
        if self._last is not None and self._last - self._measured > _STALE * answers.held_seconds:
            accepted = max(accepted, _HOPED)
        useful = answers.useful(bare=promised is None)
        if promised is not None:
            return useful * max(accepted - promised, 0.0)
        more = max(accepted - self._own.value, 0.0)
        return useful * more * (1.0 - share_in_time(accepted, step, answers.held_seconds))
