"""Calibration of the draft service's scores: accepted draft tokens over those that the scores promised, by session.

A drafter whose draft tokens are not verified gives no evidence. So one draft token is tried now and then (`due`), ever
more seldom as long as it is rejected.
"""

from __future__ import annotations

from services.target.speculation.estimates.acceptance import DECAY, AcceptanceEstimate

_DECAY_AFTER_PAUSE = 0.3  # where a drafter that was given up turns out right: it may be another one by now
_MIN_RATIO, _MAX_RATIO = 0.01, 2.0  # accepted over promised tokens; above 0, so that a rejected drafter is ranked still
_FIRST_INTERVAL, _MAX_INTERVAL = 8, 128  # steps between tries: at first, and at most


class Calibration:
    """Accepted over promised draft tokens, of one session or of all."""

    def __init__(self, prior: float = 1.0, interval: int = _FIRST_INTERVAL, steps: int = 0) -> None:
        """interval: steps between tries; steps: how many of them have passed."""
        self._estimate = AcceptanceEstimate([prior], DECAY)
        self._interval = interval
        self._steps = steps  # since the last evidence

    def for_new_session(self, session_id: int) -> Calibration:
        """The start of a new session: the ratio and the interval of all sessions; neighbours try in different steps."""
        return Calibration(self.ratio, self._interval, -session_id % self._interval)  # the first ones try soon

    @property
    def ratio(self) -> float:
        """Factor for the drafter's probabilities."""
        return min(max(self._estimate.rate(), _MIN_RATIO), _MAX_RATIO)

    @property
    def due(self) -> bool:
        """True if one draft token is to be tried without regard to its expected gain."""
        return self._steps >= self._interval

    def observe(self, promised: float, accepted: int) -> None:
        """Add one step. promised: sum of its draft tokens' probabilities. accepted: draft tokens accepted."""
        self._steps += 1
        if not promised:
            return
        decay = _DECAY_AFTER_PAUSE if accepted and self._steps >= _FIRST_INTERVAL else None
        self._steps = 0
        if accepted and promised > 1.0:  # more than a try
            self._interval = _FIRST_INTERVAL
        elif accepted:  # a try alone: no reason for many more where accepted tokens are not worth their cost
            self._interval = _MAX_INTERVAL // 2
        else:
            self._interval = min(2 * self._interval, _MAX_INTERVAL)
        self._estimate.observe(promised, accepted, decay=decay)


class Calibrations:
    """The calibrations of all open sessions, by session id. overall: of all sessions, where new ones start."""

    def __init__(self) -> None:
        self._sessions: dict[int, Calibration] = {}
        self.overall = Calibration()

    def __getitem__(self, session_id: int) -> Calibration:
        return self._sessions[session_id]

    def open(self, session_id: int) -> None:
        """A session begins."""
        self._sessions[session_id] = self.overall.for_new_session(session_id)

    def close(self, session_id: int) -> None:
        """A session has ended."""
        self._sessions.pop(session_id, None)

    def forget(self) -> None:
        """Drop the evidence of all sessions."""
        self.overall = Calibration()
