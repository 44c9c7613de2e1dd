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
_DOUBLINGS = (TURN // _FIRST_TURN).bit_length() - 1
_SHORT_TURN = 8  # of a way that is far behind
# A way that is not the best is tried again once what its last turn cost is so small a part of the time since. Of two
# that need hints the worse one has less where plain steps are the best: it would hardly win if the better one does not.
_SHARE, _SHARE_OF_WORST = 0.005, 0.00125
_SOONEST = 16  # turns as long as its own, at least
_LATEST = 300.0  # seconds, at most
# A turn may go wrong by what is no fault of its way: a program that is compiled, another process that starts. So a way
# is given up for long only once it has been behind again and again: its first pause is so many seconds at most, or
# `_SOONEST` turns of the best way, each further one so many times as long.
_DOUBT, _DOUBTS_LESS = 1.0, 4.0
_MOST_DOUBTS = 8  # that count: pauses are `_LATEST` by then, and powers of a count without end leave all numbers behind
_FIRST_REST = 30.0  # seconds that a load lasts before hints are tried where they are dear: that takes one or so
_MUCH = 1.5  # by so much less do twice as many sessions gain: they are tried at once where that leaves a gain
_LEAD = 1.02  # that hints must have: what is gained by less may be noise, and costs drafters their time
_FAR_BEHIND = 0.9  # of the best one's rate
_KEPT = 0.9  # what remains of a measurement with each turn after it
_KEPT_LEAST = 0.3
_KEPT_PROMPTS = 0.98  # ... of what is known of prompts, with each step that reads some in the same way
_PRIOR_ROWS = 512  # of prompts, for which what all ways took counts


class SpeculationMode(Enum):
    """A way of working."""

    WAIT_FOR_DRAFT = auto()
    DRAFT_IF_READY = auto()
    SELF_SPECULATE = auto()
    NONE = auto()


DRAFT_MODES = (SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY)  # what needs drafters


class PrefillCost:
    """What a row of a prompt takes, in seconds, where drafters read it, too, and where not; and how many a token needs.

    Prompts of one turn may be twice as dear as those of another, so that ways are told apart by nothing else.
    """

    def __init__(self) -> None:
        self._rows = {True: 0.0, False: 0.0}  # by whether drafters read them
        self._seconds = {True: 0.0, False: 0.0}
        self._all_rows = 0.0
        self._tokens = 0.0  # committed, as long as all rows are remembered

    def read(self, way: SpeculationMode, rows: int, seconds: float) -> None:
        """Take in a step. seconds: that its prompts took."""
        hinted = way in DRAFT_MODES
        self._rows[hinted] = self._rows[hinted] * _KEPT_PROMPTS + rows
        self._seconds[hinted] = self._seconds[hinted] * _KEPT_PROMPTS + seconds
        self._all_rows = self._all_rows * _KEPT_PROMPTS + rows
        self._tokens *= _KEPT_PROMPTS

    def committed(self, tokens: int) -> None:
        """Take in tokens of all sessions together."""
        self._tokens += tokens

    def seconds(self, way: SpeculationMode) -> float:
        """A token's share of prompts: the seconds that they take under a way."""
        rows = sum(self._rows.values())
        if not rows or not self._tokens:
            return 0.0
        usual = sum(self._seconds.values()) / rows
        hinted = way in DRAFT_MODES
        own = (self._seconds[hinted] + _PRIOR_ROWS * usual) / (self._rows[hinted] + _PRIOR_ROWS)
        return own * self._all_rows / self._tokens


@dataclass(frozen=True)
class _Trial:
    """The last turn of a way, all steps without prompts. ended: seconds at this load; tokens: of each session."""

    ended: float
    tokens: float
    seconds: float


@dataclass
class _Measured:
    """Tokens a session, seconds and steps of one way of working; older turns count less."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    turn: int = 0  # when it was measured last; 0 for never
    trial: _Trial = _Trial(0.0, 0.0, 0.0)
    hopeful: bool = False  # its last turn was better than the best way: it may be better than what it did before says
    behind: int = 0  # turns, one after another, after which it was not the best

    @property
    def brings(self) -> bool:
        """Whether its steps commit more than the token that each brings without hints."""
        return self.tokens > _LEAD * self.steps

    def add(self, turn: int, tokens: float, seconds: float, steps: float) -> None:
        """Take in a turn."""
        kept = max(_KEPT ** (turn - self.turn), _KEPT_LEAST)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds
        self.steps = self.steps * kept + steps
        self.turn = turn


class ModeSelector:
    """The ways at one load; `way` is that of the present turn.

    gain: rate of the better way with hints over that without; until it is known, what fewer sessions make of it
    hopeless: seconds that a turn with hints costs where they are far behind; None if they are not, or nobody knows
    """

    def __init__(
        self,
        ways: Sequence[SpeculationMode],
        first: SpeculationMode,
        prompts: PrefillCost,
        fewer: ModeSelector | None = None,
        doublings: int = 1,
        *,
        many: bool = False,
    ) -> None:
        """first: the way to begin with. fewer: the contest of fewer sessions, which have more to gain than these.

        doublings: how often their number fits into this one's. many: a first turn with hints has many prompts to read,
        or dear rows. The load must last for a while to be worth that, unless fewer sessions have gained much.
        """
        self._measured = {way: _Measured() for way in sorted(ways, key=lambda way: way is not SpeculationMode.NONE)}
        self._prompts = prompts
        self._turns = 0
        self._elapsed = 0.0  # seconds in steps
        self._tokens = self._seconds = 0.0  # since the last turn's end, measured or not; tokens of each session
        self._short = False
        self._sessions = 1.0
        self.hopeless = fewer.hopeless if fewer is not None else None
        self.gain = fewer.gain / _MUCH**doublings if fewer is not None else 0.0
        self._doubt = _FIRST_REST if many else _DOUBT
        self._rest = self._first_rest(many)
        # Many sessions come with prompts, whose steps are not measured: what does not pay would last till all are read.
        guessed = many and first is SpeculationMode.SELF_SPECULATE and SpeculationMode.NONE in self._measured
        self.way = SpeculationMode.NONE if guessed or (self._rest and first in DRAFT_MODES) else first

    def _first_rest(self, many: bool) -> float:
        """Seconds after which hints are tried first."""
        if self.hopeless is not None:
            return _pause(self.hopeless, _SHARE)
        return _FIRST_REST if many and self.gain < 1.0 and SpeculationMode.NONE in self._measured else 0.0

    @property
    def steps(self) -> int:
        """Length of the present turn: at first short ones, so that what does not pay is soon known not to."""
        doublings = min(self._turns // len(self._measured), _DOUBLINGS)
        return min(_FIRST_TURN << doublings, _SHORT_TURN if self._short else TURN)

    def spend(self, tokens: float, seconds: float) -> None:
        """Take in a step without prompts, whether it is measured or not. tokens: of each session."""
        self._elapsed += seconds
        self._tokens += tokens
        self._seconds += seconds

    def read(self, seconds: float) -> None:
        """Take in a step with prompts."""
        self._elapsed += seconds

    def end_turn(self, tokens: float, seconds: float, sessions: float = 1, steps: float = 0.0) -> None:
        """A turn has ended; choose the next one's way. tokens: of each of so many sessions, in measured steps.

        steps: so many; 0 where that is not told
        """
        self._turns += 1
        present = self._measured[self.way]
        rested = self._rest > 0.0 and self.way in DRAFT_MODES and not present.turn
        present.add(self._turns, tokens, seconds, steps)
        present.trial = _Trial(self._elapsed, self._tokens, self._seconds)
        self._tokens = self._seconds = 0.0
        self._sessions = sessions
        rates = {way: self._rate(way) for way, measured in self._measured.items() if measured.turn}
        for way in rates.keys() & set(DRAFT_MODES):  # hints that are never right made no turn a fast one
            if not self._measured[way].brings:
                rates[way] = min(rates[way], rates.get(SpeculationMode.NONE, math.inf))
        best = max(rates, key=lambda way: rates[way] * (1.0 if way in DRAFT_MODES else _LEAD))
        # Hints that come after a rest are at first chosen by scores that are not calibrated, and the next trial may be
        # a quarter of a minute away: a first turn that is not far behind is followed by another one.
        hope = _FAR_BEHIND if rested and self.way is not best else 1.0
        present.hopeful = tokens > _LEAD * steps and self._rate_of(seconds / tokens, self.way) > hope * rates[best]
        present.behind = present.behind + 1 if self.way is not best and not present.hopeful else 0
        self._judge_hints(rates)
        due = [way for way in self._measured if way is not best and self._due(way, rates, best) <= self._elapsed]
        self.way = due[0] if due else best
        self._short = self.way is not best and rates.get(self.way, math.inf) < _FAR_BEHIND * rates[best]

    def _judge_hints(self, rates: dict[SpeculationMode, float]) -> None:
        hinted = [way for way in rates if way in DRAFT_MODES]
        plain = rates.get(SpeculationMode.NONE)
        if not plain or not hinted:
            return
        self.gain = max(map(rates.__getitem__, hinted)) / plain
        self.hopeless = max(self._lost(way, plain) for way in hinted) if self.gain < _FAR_BEHIND else None

    def _due(self, way: SpeculationMode, rates: dict[SpeculationMode, float], best: SpeculationMode) -> float:
        """When a way that is not the best has its next turn; seconds at this load."""
        measured = self._measured[way]
        others = [other for other in rates if other in DRAFT_MODES]
        if not measured.turn:
            if way not in DRAFT_MODES:  # drafters have nothing to catch up on
                return 0.0
            if not others or self.hopeless is None:
                return self._rest
            return max(self._measured[o].trial.ended for o in others) + _pause(self.hopeless, _SHARE_OF_WORST)
        if measured.hopeful:
            return measured.trial.ended
        worst = best not in DRAFT_MODES and len(others) > 1 and rates[way] == min(rates.values())
        lost = self._lost(way, max(rates.values()))
        pause = _pause(lost, _SHARE_OF_WORST if worst else _SHARE, measured.trial.seconds)
        if (
            way is SpeculationMode.NONE and best is SpeculationMode.SELF_SPECULATE
        ):  # nobody but the target itself takes part in either
            return measured.trial.ended + pause
        doubt = max(self._doubt, _SOONEST * self._measured[best].trial.seconds)
        doubts = min(max(measured.behind - 1 + worst, 0), _MOST_DOUBTS)
        return measured.trial.ended + min(pause, doubt * _DOUBTS_LESS**doubts)

    def _lost(self, way: SpeculationMode, rate: float) -> float:
        """Seconds that a way's last turn cost beside one of so many tokens a session and second."""
        trial = self._measured[way].trial
        prompts = self._sessions * self._prompts.seconds(way)
        return trial.seconds + trial.tokens * (prompts - 1.0 / rate) if rate else 0.0

    def _rate(self, way: SpeculationMode) -> float:
        """Tokens a session and second, prompts counted in."""
        measured = self._measured[way]
        return self._rate_of(measured.seconds / measured.tokens, way) if measured.tokens else 0.0

    def _rate_of(self, seconds: float, way: SpeculationMode) -> float:
        """seconds: of a session's token in steps without prompts."""
        return 1.0 / (seconds + self._sessions * self._prompts.seconds(way))


def _pause(lost: float, share: float, turn: float = 0.0) -> float:
    """Seconds after which what costs so much may be tried again. turn: seconds of a turn."""
    return min(max(lost / share, _SOONEST * turn), _LATEST)
