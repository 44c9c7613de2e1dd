"""What steps take and bring: of one trial of a speculation mode, and on average."""

from __future__ import annotations

from collections.abc import Hashable

# Steps at the start of a trial that are not measured: drafters learn of the mode first, or do work that comes once.
_SETTLING = 2
_MAX_EXCESS = 4.0  # a step that takes longer than this many usual ones of its mode counts as one that takes this long
_EMA_WEIGHT = 0.2  # of the last step in the usual time of one


class ModeTrial:
    """The measured steps of the present trial.

    steps: their number; below 0 while the trial settles. tokens: per session; own: those of the target's own sources
    unanswered: steps whose sessions no drafter has answered
    """

    def __init__(self) -> None:
        self._usual: dict[Hashable, float] = {}  # seconds of a measured step at this load, by mode
        self.start(settles=False)

    def start(self, *, settles: bool) -> None:
        """A trial begins. settles: drafters learn of another mode, or of a new load."""
        self.steps = -_SETTLING if settles else 0
        self.tokens = self.seconds = self.own = 0.0
        self.unanswered = 0

    def forget_usual(self) -> None:
        """Steps go on at another load, where they take another time."""
        self._usual = {}

    def add(self, mode: Hashable, tokens: float, seconds: float, steps: int, own: float) -> None:
        """Add a step, or several at once. tokens, own: per session."""
        # The first step after a pause is long. A deep draft's step is, too, so that each mode has its own measure.
        usual = self._usual.get(mode, seconds / steps)
        self._usual[mode] = usual + _EMA_WEIGHT * (min(seconds / steps, _MAX_EXCESS * usual) - usual)
        if seconds > _MAX_EXCESS * steps * usual:
            seconds = steps * usual
        self.steps += steps
        if self.steps > 0:
            self.tokens += tokens
            self.seconds += seconds
            self.own += own


class StepPace:
    """A step without prompts, waits excluded, on average. seconds: of it; 0 before the first one"""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._tokens = 1.0  # per session, that it commits

    def add(self, tokens: float, seconds: float) -> None:
        """Add a step. tokens: per session."""
        new = _EMA_WEIGHT if self.seconds else 1.0
        self.seconds += new * (seconds - self.seconds)
        self._tokens += new * (tokens - self._tokens)

    def seconds_of(self, tokens: float) -> float:
        """Seconds in which this many tokens per session are committed."""
        return self.seconds * tokens / self._tokens
