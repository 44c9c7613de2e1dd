"""Whether a step that has draft tokens left should wait for the answer to its last commit.

What survives a commit was drafted ahead, from a drafter's own states; the answer is drafted from the commit itself, and
usually promises more. Waiting pays if the tokens that the answer adds exceed those that the target commits in the time:

    sum over sessions of max(usual acceptance - what the present tree promises, 0) > throughput * seconds to the answer

All of these are measured, so the choice follows the network's delay, the drafter's time and the length of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

_EMA_WEIGHT = 0.1
_LEAST = 8  # answers, or steps, before a measurement counts
_LONGEST = 1.0  # seconds from commit to commit; more is a pause


class _Average:
    """An exponential average. count: of the values."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        """Add a value; the first ones count equally."""
        self.count += 1
        self.value += max(_EMA_WEIGHT, 1 / self.count) * (value - self.value)


class WaitGain:
    """Measures one engine's answers; knows sessions by id."""

    def __init__(self) -> None:
        self._latency, self._accepted = _Average(), _Average()
        self._tokens, self._seconds = _Average(), _Average()
        self._asked: dict[int, float] = {}  # when the last commit of each session was sent, until it is answered
        self._answered: set[int] = set()  # sessions whose next step has an answer to the last commit
        self._last: float | None = None

    def answered(self, session_id: int, now: float) -> None:
        """A fresh answer has come."""
        asked = self._asked.pop(session_id, None)
        if asked is not None:
            self._latency.add(now - asked)
            self._answered.add(session_id)

    def committed(self, now: float, wanted: Collection[int], accepted: Mapping[int, int], tokens: int) -> None:
        """A step without prompts has ended. wanted: sessions whose draft tokens are wanted next.

        accepted: draft tokens of each session; tokens: of all sessions, bonus tokens included
        """
        for session_id in self._answered & accepted.keys():
            self._accepted.add(accepted[session_id])
        if self._last is not None and now - self._last < _LONGEST:
            self._tokens.add(tokens)
            self._seconds.add(now - self._last)
        self._last = now
        self._answered.clear()
        self._asked = dict.fromkeys(wanted, now)

    def pays(self, promised: Iterable[float]) -> bool:
        """True if waiting pays, or too little is known. promised: of the present trees of all sessions."""
        if min(self._latency.count, self._accepted.count, self._seconds.count) < _LEAST:
            return True
        more = sum(max(self._accepted.value - own, 0.0) for own in promised)
        return more * self._seconds.value > self._tokens.value * self._latency.value
