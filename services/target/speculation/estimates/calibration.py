"""Calibration of drafters' scores: how many draft tokens were accepted for every one that the scores promised."""

from __future__ import annotations

_KEPT = 0.97  # what remains of the evidence after a step that adds to it
_KEPT_AFTER_PAUSE = 0.3  # ... and when a drafter that was given up turns out right: it may be another by now
_PRIOR = 2.0  # promised nodes that the prior counts for
_LEAST, _MOST = 0.01, 2.0
_SPREAD = 7919  # a prime: neighbouring sessions are tried in unlike steps
_SOONEST, _AGAIN, _LATEST = 8, 64, 128  # steps after which a drafter that was given up is tried again


class Calibration:
    """Accepted over promised nodes, of one session or of all. Evidence fades, for texts change.

    A drafter whose hints are left aside gives no evidence. So now and then one node is tried all the same (`due`), ever
    more seldom as long as that fails.
    """

    def __init__(self, prior: float = 1.0, pause: int = _SOONEST, steps: int = 0) -> None:
        """pause: steps between tries; steps: how many of them are over."""
        self._prior = prior
        self._promised = 0.0
        self._accepted = 0.0
        self._pause = pause
        self._steps = steps  # since evidence came

    def heir(self, session_id: int) -> Calibration:
        """A new session's, where all others are: with tries as seldom, and not in the same step as everybody's."""
        return Calibration(self.ratio, self._pause, session_id * _SPREAD % self._pause)

    @property
    def ratio(self) -> float:
        """Factor for probabilities."""
        ratio = (self._accepted + _PRIOR * self._prior) / (self._promised + _PRIOR)
        return min(max(ratio, _LEAST), _MOST)

    @property
    def due(self) -> bool:
        """True if one node should be tried, whatever it seems to be worth."""
        return self._steps >= self._pause

    def observe(self, promised: float, accepted: int) -> None:
        """Take in one step. promised: sum of its nodes' probabilities. accepted: nodes on the accepted path."""
        self._steps += 1
        if not promised:
            return
        kept = _KEPT_AFTER_PAUSE if accepted and self._steps >= _SOONEST else _KEPT
        self._steps = 0
        if accepted and promised > 1.0:  # more than a try: its worth is known
            self._pause = _SOONEST
        else:  # a try that succeeds is no reason for many more where hints that succeed do not pay
            self._pause = max(self._pause // 2, _AGAIN) if accepted else min(2 * self._pause, _LATEST)
        self._promised = self._promised * kept + promised
        self._accepted = self._accepted * kept + accepted


class Calibrations:
    """Those of all open sessions, by session id. overall: of all sessions together, where new ones begin."""

    def __init__(self) -> None:
        self._sessions: dict[int, Calibration] = {}
        self.overall = Calibration()

    def __getitem__(self, session_id: int) -> Calibration:
        return self._sessions[session_id]

    def open(self, session_id: int) -> None:
        """A session begins, where all others are."""
        self._sessions[session_id] = self.overall.heir(session_id)

    def close(self, session_id: int) -> None:
        """The session has ended."""
        self._sessions.pop(session_id, None)

    def forget(self) -> None:
        """Begin anew with what sessions taught."""
        self.overall = Calibration()
