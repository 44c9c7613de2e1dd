"""Tokens and seconds of steps: of one trial of a speculation mode, and on average."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from services.target.speculation.estimates.average import WEIGHT
from services.target.speculation.estimates.step_cost import MAX_EXCESS

TRIAL = 16  # measured steps of a trial
# Steps at the start of a trial that are not measured: drafters learn of the mode first, or do work that comes once.
SETTLING = 2


@dataclass
class Steps:
    """What some steps brought, per session, and took.

    tokens: committed; seconds: held ones included; own: of the tokens, draft tokens of the target's own sources
    drafted: steps that verified draft tokens of a draft service, of which `accepted` were; held: seconds of waiting
    drafted_seconds: of the steps with such draft tokens, waiting excluded
    """

    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    own: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    held: float = 0.0
    drafted_seconds: float = 0.0

    def add(self, new: Steps, kept: float = 1.0, scale: float = 1.0) -> None:
        """Add others. kept: factor of the present ones; scale: of the new ones."""
        self.tokens = self.tokens * kept + new.tokens * scale
        self.seconds = self.seconds * kept + new.seconds * scale
        self.steps = self.steps * kept + new.steps * scale
        self.own = self.own * kept + new.own * scale
        self.drafted = self.drafted * kept + new.drafted * scale
        self.accepted = self.accepted * kept + new.accepted * scale
        self.held = self.held * kept + new.held * scale
        self.drafted_seconds = self.drafted_seconds * kept + new.drafted_seconds * scale


class ModeTrial:
    """The measured steps of the present trial.

    steps: their number; below 0 while the trial settles. total: of those that count, per session
    unanswered: steps whose sessions no drafter has answered
    """

    def __init__(self) -> None:
        self._usual: dict[Hashable, float] = {}  # seconds of a measured step at this load, by mode
        self.start(settles=False)

    def start(self, *, settles: bool) -> None:
        """A trial begins. settles: drafters learn of another mode, or of a new load."""
        self.steps = -SETTLING if settles else 0
        self._late = 0
        self._settles = settles
        self.total = Steps()
        self.unanswered = 0

    def forget_usual(self) -> None:
        """Steps go on at another load, where they take another time."""
        self._usual = {}

    def add(self, mode: Hashable, new: Steps, late: int = 0) -> None:
        """Add a step, or several at once. late: steps that an answer takes, which are not measured either."""
        if self._settles and self.steps == 0 and self._late < late:
            self._late += 1
            return
        seconds, steps = new.seconds, new.steps
        # The first step after a pause is long. A deep draft's step is, too, so that each mode has its own measure.
        usual = self._usual.get(mode, seconds / steps)
        self._usual[mode] = usual + WEIGHT * (min(seconds / steps, MAX_EXCESS * usual) - usual)
        if seconds > MAX_EXCESS * steps * usual:
            cut = steps * usual / seconds
            held, drafted = new.held * cut, new.drafted_seconds * cut
            new = replace(new, seconds=steps * usual, held=held, drafted_seconds=drafted)
        self.steps += round(steps)
        if self.steps > 0:
            self.total.add(new)


class StepPace:
    """A step without prompts, waits excluded, on average. seconds: of it; 0 before the first one"""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._tokens = 1.0  # per session, that it commits

    def add(self, tokens: float, seconds: float) -> None:
        """Add a step. tokens: per session."""
        new = WEIGHT if self.seconds else 1.0
        self.seconds += new * (seconds - self.seconds)
        self._tokens += new * (tokens - self._tokens)

    def seconds_of(self, tokens: float) -> float:
        """Seconds in which this many tokens per session are committed."""
        return self.seconds * tokens / self._tokens
