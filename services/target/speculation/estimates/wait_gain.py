"""Whether a step that has draft tokens left should wait for the answer to its last commit.

What survives a commit was drafted ahead, from a drafter's own states; the answer is drafted from the commit itself, and
usually promises more. Waiting pays if the tokens that the answer adds exceed those that the target commits in the time:

    sum over sessions of max(usual acceptance - what the present tree promises, 0) > throughput * seconds to the answer

All of these are measured, so the choice follows the network's delay, the drafter's time and the length of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.estimates.average import Average

_WEIGHT = 0.1  # of the last step in averages
_LEAST = 8  # answers, or steps, before a measurement counts
_LONGEST = 1.0  # seconds from commit to commit; more is a pause


class WaitGain:
    """Measures one engine's answers; knows sessions by id."""

    def __init__(self, latency: AnswerLatency) -> None:
        self._latency, self._accepted = latency, Average(_WEIGHT)
        self._tokens, self._seconds = Average(_WEIGHT), Average(_WEIGHT)
        self._answered: set[int] = set()  # sessions whose next step has an answer to the last commit
        self._last: float | None = None

    def answered(self, session_id: int) -> None:
        """An answer to the last commit has come."""
        self._answered.add(session_id)

    def committed(self, now: float, accepted: Mapping[int, int], tokens: int) -> None:
        """A step without prompts has ended. accepted: draft tokens of each session; tokens: of all, bonus included"""
        for session_id in self._answered & accepted.keys():
            self._accepted.add(accepted[session_id])
        if self._last is not None and now - self._last < _LONGEST:
            self._tokens.add(tokens)
            self._seconds.add(now - self._last)
        self._last = now
        self._answered.clear()

    def pays(self, promised: Iterable[float]) -> bool:
        """True if waiting pays, or too little is known. promised: of the present trees of all sessions."""
        if min(self._latency.count, self._accepted.count, self._seconds.count) < _LEAST:
            return True
        more = sum(max(self._accepted.value - own, 0.0) for own in promised)
        return more * self._seconds.value > self._tokens.value * self._latency.held_seconds
