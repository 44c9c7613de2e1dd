"""Ways of working, measured against one another at one load.

What counts is the time that a token takes: in steps that draw tokens alone, and as its share of prompts, which are read
more slowly where a drafter reads them, too. Now and then each way has a turn, because texts, drafters and load change.
What that costs beside the best way, with all that a drafter has to catch up on first, decides when it is tried again:
trials may take so much of the time and no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

TURN = 16  # steps that a turn is measured; the first turns at a load are shorter
_FIRST_TURN = 4
_SHORT_TURN = 8  # of a way that is far behind
# A way that is not the best is tried again once what its last turn cost is so small a part of the time since. Of two
# that need hints the worse one has less where plain steps are the best: it would hardly win if the better one does not.
_SHARE, _SHARE_OF_WORST = 0.005, 0.00125
_SOONEST = 16  # turns as long as its own, at least
_LATEST = 300.0  # seconds, at most
_LEAD = 1.02  # that others must have before PLAIN: what is gained by less may be noise, and costs drafters their time
_FAR_BEHIND = 0.9  # of the best one's rate
_KEPT = 0.9  # what remains of a measurement with each turn after it
_KEPT_LEAST = 0.3
_KEPT_PROMPTS = 0.98  # ... of what is known of prompts, with each step that reads some in the same way
_PRIOR_ROWS = 512  # of prompts, for which what all ways took counts


class Way(Enum):
    """A way of working."""

    WAIT = auto()
    GO = auto()
    PLAIN = auto()


class Prompts:
    """What a row of a prompt takes, in seconds, by way; and how many rows come with a token."""

    def __init__(self) -> None:
        self._rows = dict.fromkeys(Way, 0.0)
        self._seconds = dict.fromkeys(Way, 0.0)
        self._all_rows = 0.0
        self._tokens = 0.0  # committed, as long as all rows are remembered

    def read(self, way: Way, rows: int, seconds: float) -> None:
        """Take in a step. seconds: that its prompts took."""
        self._rows[way] = self._rows[way] * _KEPT_PROMPTS + rows
        self._seconds[way] = self._seconds[way] * _KEPT_PROMPTS + seconds
        self._all_rows = self._all_rows * _KEPT_PROMPTS + rows
        self._tokens *= _KEPT_PROMPTS

    def committed(self, tokens: int) -> None:
        """Take in tokens of all sessions together."""
        self._tokens += tokens

    def seconds(self, way: Way) -> float:
        """A token's share of prompts: the seconds that they take under a way."""
        rows = sum(self._rows.values())
        if not rows or not self._tokens:
            return 0.0
        usual = sum(self._seconds.values()) / rows
        own = (self._seconds[way] + _PRIOR_ROWS * usual) / (self._rows[way] + _PRIOR_ROWS)
        return own * self._all_rows / self._tokens


@dataclass
class _Measured:
    """Tokens a session, and seconds, of one way of working; older turns count less."""

    tokens: float = 0.0
    seconds: float = 0.0
    turn: int = 0  # when it was measured last
    due: float = 0.0  # when it is tried again, if it is not the best; seconds at this load

    def add(self, turn: int, tokens: float, seconds: float) -> None:
        """Take in a turn."""
        kept = max(_KEPT ** (turn - self.turn), _KEPT_LEAST)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds
        self.turn = turn


class Contest:
    """The ways at one load; `way` is that of the present turn."""

    def __init__(self, ways: Sequence[Way], first: Way, prompts: Prompts) -> None:
        self._measured = {way: _Measured() for way in ways}
        self._prompts = prompts
        self._turns = 0
        self._elapsed = 0.0  # seconds in steps
        self._tokens = self._seconds = 0.0  # since the last turn's end, measured or not; tokens of each session
        self._short = False
        self.way = first

    @property
    def steps(self) -> int:
        """Length of the present turn: at first short ones, so that what does not pay is soon known not to."""
        return min(_FIRST_TURN << self._turns // len(self._measured), _SHORT_TURN if self._short else TURN)

    def spend(self, tokens: float, seconds: float) -> None:
        """Take in a step without prompts, whether it is measured or not. tokens: of each session."""
        self._elapsed += seconds
        self._tokens += tokens
        self._seconds += seconds

    def read(self, seconds: float) -> None:
        """Take in a step with prompts."""
        self._elapsed += seconds

    def end_turn(self, tokens: float, seconds: float, sessions: float = 1) -> None:
        """A turn has ended; choose the next one's way. tokens: of each of so many sessions, in measured steps."""
        self._turns += 1
        present = self._measured[self.way]
        present.add(self._turns, tokens, seconds)
        rates = {way: self._rate(way, sessions) for way in self._measured}
        best = max(rates, key=lambda way: rates[way] * (_LEAD if way is Way.PLAIN else 1.0))
        if tokens and self._rate_of(seconds / tokens, self.way, sessions) > rates[best]:
            present.due = self._elapsed  # it may have become better than what it did before says
        else:
            present.due = self._elapsed + self._pause(rates, best, sessions)
        self._tokens = self._seconds = 0.0
        due = [way for way, measured in self._measured.items() if way is not best and measured.due <= self._elapsed]
        self.way = due[0] if due else best
        self._short = self.way is not best and rates[self.way] < _FAR_BEHIND * rates[best]

    def _pause(self, rates: dict[Way, float], best: Way, sessions: float) -> float:
        """Seconds after which the present way may have another turn, if it is not the best."""
        prompts = self._tokens * sessions * self._prompts.seconds(self.way)
        highest = max((rate for rate in rates.values() if 0 < rate < math.inf), default=math.inf)
        lost = self._seconds + prompts - self._tokens / highest
        worst = best is Way.PLAIN and len(rates) > 2 and rates[self.way] == min(rates.values())
        pause = lost / (_SHARE_OF_WORST if worst else _SHARE)
        return min(max(pause, _SOONEST * self._seconds), _LATEST)

    def _rate(self, way: Way, sessions: float) -> float:
        """Tokens a session and second, prompts counted in; without a measurement, as good as can be."""
        measured = self._measured[way]
        if not measured.seconds or not measured.tokens:
            return math.inf if not measured.seconds else 0.0
        return self._rate_of(measured.seconds / measured.tokens, way, sessions)

    def _rate_of(self, seconds: float, way: Way, sessions: float) -> float:
        """seconds: of a session's token in steps without prompts."""
        return 1.0 / (seconds + sessions * self._prompts.seconds(way))
