"""Speculation modes, measured against one another at one load.

Whether a draft service pays can only be measured: on shared cores it slows the target down, by an amount that no model
predicts. What counts is the time that a token takes: in steps that sample tokens alone, and as its share of prompts,
which take longer where a drafter reads them, too. Each mode has a trial now and then, because texts, drafters and load
change. The cost of a trial beside the best mode, with all that a drafter has to catch up on first, decides when the
mode is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.prediction import predicted, variances
from services.target.speculation.modes.prefill_cost import PrefillCost
from services.target.speculation.modes.throughput import MIN_GAIN, ModeThroughput, Trial
from services.target.speculation.modes.trial import SETTLING, TRIAL, Steps

# Measured steps of the first trials at a load, and of a mode that is far behind: it ends soon.
_FIRST_TRIAL = TRIAL // 4
_DOUBLINGS = (TRIAL // _FIRST_TRIAL).bit_length() - 1  # from the first length of a trial to the last
_FAR_BEHIND = 0.9  # of the best mode's throughput
# A losing mode is retried when what a trial costs is at most this share of the time since its last one.
_COST_SHARE = 0.005
_DOUBT_SHARE = 0.1  # the same for a mode that is the best after all, times the probability that it is
_MIN_PAUSE_TRIALS = 16  # of the mode's own trials; fewer where it may be the best
_MAX_PAUSE = 300.0  # seconds
# A trial may go wrong for reasons outside its mode, such as a program that is compiled or a process that starts. So a
# mode is given up for long only after several losses: its first pause is at most one second, or 16 trials of the
# best mode, each further one this many times as long. More losses than _MAX_LOSSES lead beyond the longest pause.
_FIRST_PAUSE, _PAUSE_GROWTH = 1.0, 4.0
_MAX_LOSSES = math.ceil(math.log(_MAX_PAUSE / _FIRST_PAUSE, _PAUSE_GROWTH))  # consecutive ones
_FIRST_DELAY = 30.0  # seconds that a load lasts before drafts are tried where a trial costs about one second
_GAIN_LOSS = 1.5  # factor by which the gain of drafts shrinks with twice as many sessions


class ModeSelector(ModeThroughput):
    """The modes at one load; `mode` is that of the present trial, the number `trials` + 1.

    gain: throughput of the better mode with a draft service over that without; until measured, derived from the
        gain at fewer sessions
    probes: the present trial comes after a pause; what has been measured may have changed
    loss: seconds that a trial with drafts costs where they are far behind; None if they are not, or not measured
    """

    def __init__(
        self,
        modes: Sequence[SpeculationMode],
        first: SpeculationMode,
        prompts: PrefillCost,
        fewer: ModeSelector | None = None,
        doublings: int = 1,
        *,
        latency: AnswerLatency | None = None,
        many: bool = False,
        drafts_ahead: Callable[[], bool] = lambda: True,
    ) -> None:
        """first: the mode to begin with. fewer: the selector of fewer sessions, which have more to gain than these.

        doublings: from their number to this one's. latency: of a draft's answers. many: a first trial with drafts has
        many prompts to read, or expensive trees; the load must last for a while to be worth that, unless fewer sessions
        gained much. drafts_ahead: as of ModePolicy
        """
        super().__init__(modes, prompts, fewer, latency)
        self.trials = 0
        self._drafts_ahead = drafts_ahead
        self._elapsed = 0.0  # seconds in steps
        self._since = Steps()  # the last trial's end: all steps, measured or not
        self._short = False
        self.probes = True
        self.loss: float | None = fewer.loss if fewer is not None else None
        self.gain: float = fewer.gain / _GAIN_LOSS**doublings if fewer is not None else 0.0
        self._first_pause = _FIRST_DELAY if many else _FIRST_PAUSE
        self._delay = 0.0 if self._alone is None else _first_delay(self.loss, self.gain, many=many)
        self.mode = self._alone if self._delay and first in DRAFT_MODES and self._alone is not None else first

    @property
    def steps(self) -> int:
        """Length of the present trial: short at first, and of a mode that is far behind; a losing one ends soon."""
        if self.mode is SpeculationMode.NONE and not self._measured[self.mode].trials:
            return _FIRST_TRIAL // 2  # each step commits a token: nothing but its time is unknown
        doublings = 0 if self._short else min(self.trials // len(self._measured), _DOUBLINGS)
        return _FIRST_TRIAL << doublings

    def add_step(self, tokens: float, seconds: float) -> None:
        """Add a step without prompts, measured or not. tokens: per session."""
        self._elapsed += seconds
        self._since.add(Steps(tokens, seconds))

    def add_prefill(self, seconds: float) -> None:
        """Add a step with prompts."""
        self._elapsed += seconds

    def end_trial(self, new: Steps, sessions: float = 1) -> None:
        """A trial has ended; choose the next mode."""
        self.trials += 1
        present = self._measured[self.mode]
        if self.mode in DRAFT_MODES and not present.trials:
            self._expect_first()
        present.add(self.trials, new)
        if new.drafted:
            self._update_accepted(new)
        pace = max(self._tokens_of(new), 1.0) / new.seconds  # a step commits a token; its logarithm must be finite
        noise, walk = variances(max(new.steps, 1.0), present.total, self._accepted, sessions)
        self._effects.observe(self.mode, pace, noise, walk, self._since.seconds)
        present.trial = Trial(self._elapsed, self._since.tokens, self._since.seconds, pace)
        self._relate(new)
        self._since = Steps()
        self._sessions = sessions
        rates = self._rates()
        best = max(rates, key=lambda mode: rates[mode] / _required_gain(mode))
        present.losses = present.losses + 1 if self.mode is not best else 0
        self._update_gain(rates)
        due = [mode for mode in self._measured if mode is not best and self._due(mode, rates, best) <= self._elapsed]
        self.mode, self.probes = due[0] if due else best, bool(due)
        expected = rates.get(self.mode) or self._rate_predicted(self.mode, best) or math.inf
        self._short = self.mode is not best and expected < _FAR_BEHIND * rates[best]

    def _update_gain(self, rates: dict[SpeculationMode, float]) -> None:
        drafted = [mode for mode in rates if mode in DRAFT_MODES]
        alone = None if self._alone is None else rates.get(self._alone)
        if not alone or not drafted:
            return
        self.gain = max(map(rates.__getitem__, drafted)) / alone
        self.loss = max(self._trial_cost(mode, alone) for mode in drafted) if self.gain < _FAR_BEHIND else None

    def _due(self, mode: SpeculationMode, rates: dict[SpeculationMode, float], best: SpeculationMode) -> float:
        """When a mode that is not the best has its next trial; seconds at this load."""
        measured = self._measured[mode]
        drafted = [other for other in rates if other in DRAFT_MODES]
        if not measured.trials:
            return self._first_due(mode, rates, best)
        worst = best not in DRAFT_MODES and len(drafted) > 1 and rates[mode] == min(rates.values())
        chance, gain = self._promise(mode, rates, best)
        share = max(_COST_SHARE, _DOUBT_SHARE * chance, gain)
        trials = min(_MIN_PAUSE_TRIALS, 0.5 / chance) if chance else _MIN_PAUSE_TRIALS
        pause = _pause(self._trial_cost(mode, rates[best]), share, trials * measured.trial.seconds)
        first = max(self._first_pause, _MIN_PAUSE_TRIALS * self._measured[best].trial.seconds)
        losses = min(max(measured.losses - 1 + worst, 0), _MAX_LOSSES)
        if self._is_explained(mode, rates, best):
            losses = _MAX_LOSSES
        return measured.trial.ended + min(pause, first * _PAUSE_GROWTH**losses)

    def _promise(
        self, mode: SpeculationMode, rates: dict[SpeculationMode, float], best: SpeculationMode
    ) -> tuple[float, float]:
        """Probability that a mode is better than the one that looks best, and the gain in throughput to expect of that,
        by how well both are known."""
        if mode in DRAFT_MODES and not self._gains(self._measured[mode].total):
            return 0.0, 0.0
        deviation = self._effects.deviation(mode, best)
        behind = math.log(rates[best] / _required_gain(best) / rates[mode] * _required_gain(mode)) / deviation
        chance = 0.5 * math.erfc(behind / math.sqrt(2.0))
        density = math.exp(-(behind**2) / 2.0) / math.sqrt(2.0 * math.pi)
        return chance, deviation * (density - behind * chance)

    def _is_explained(self, mode: SpeculationMode, rates: dict[SpeculationMode, float], best: SpeculationMode) -> bool:
        """True if a mode is far behind, and not for want of luck: it is predicted to be, from the steps of the best."""
        rate = self._rate_predicted(mode, best) if best in DRAFT_MODES else 0.0
        return rate > 0.0 and max(rate, rates[mode]) < _FAR_BEHIND * rates[best]

    def _first_due(self, mode: SpeculationMode, rates: dict[SpeculationMode, float], best: SpeculationMode) -> float:
        """When a mode has its first trial."""
        if not self._may_begin(mode):
            return math.inf
        drafted = [other for other in rates if other in DRAFT_MODES]
        if mode not in DRAFT_MODES:  # drafters have nothing to catch up on
            return 0.0
        if not drafted:
            return self._delay
        known = self._measured[drafted[-1]].total
        untried = [other for other in self._measured if other not in rates and self._may_begin(other)]
        rates_predicted = {other: self._rate_predicted(other, drafted[-1]) for other in untried}
        if rates_predicted[mode]:
            lost = 1.0 - rates_predicted[mode] / max(rates[best], *rates_predicted.values())
            pause = _pause((self.steps + SETTLING) * known.seconds / known.steps * lost, _COST_SHARE)
            return min(pause, self._first_pause * _PAUSE_GROWTH)  # as after two losses: it may be wrong
        if self.loss is None:
            return self._delay
        latest = max(self._measured[other].trial.ended for other in drafted)
        return latest + _pause(self.loss, _COST_SHARE)

    def _may_begin(self, mode: SpeculationMode) -> bool:
        """False for steps that do not wait for drafters that draft only while a step waits."""
        waits = SpeculationMode.WAIT_FOR_DRAFT in self._measured
        return mode is not SpeculationMode.DRAFT_IF_READY or not waits or self._drafts_ahead()

    def _trial_cost(self, mode: SpeculationMode, rate: float) -> float:
        """Seconds that a mode's last trial cost beside a throughput, in tokens per session and second."""
        trial = self._measured[mode].trial
        tokens = trial.tokens * self._effects.rate(mode) / trial.pace  # that it commits with usual luck
        return trial.seconds + tokens * (self._sessions * self._prompts.seconds(mode) - 1.0 / rate)

    def hopeless(self, steps: Steps) -> bool:
        """True if the present trial may end with these steps: by them a mode with drafts that had none is far ahead."""
        if self.mode not in DRAFT_MODES:
            return False
        others = [mode for mode in DRAFT_MODES if mode is not self.mode and mode in self._measured]
        others = [mode for mode in others if not self._measured[mode].trials and self._may_begin(mode)]
        made = [(mode, predicted(mode, steps, self._accepted, self._latency)) for mode in others]
        rates = [self._rate_of(steps, mode) for mode, steps in made if steps is not None]
        return bool(rates) and self._rate_of(steps, self.mode) < _FAR_BEHIND * max(rates)


def _required_gain(mode: SpeculationMode) -> float:
    """Factor of throughput that a mode must gain to be chosen."""
    return MIN_GAIN if mode in DRAFT_MODES else 1.0


def _pause(lost: float, share: float, least: float = 0.0) -> float:
    """Seconds after which a mode may be tried again. lost: seconds that a trial costs; least: seconds of a pause."""
    return min(max(lost / share, least), _MAX_PAUSE)


def _first_delay(loss: float | None, gain: float, *, many: bool) -> float:
    """Seconds after which drafts are tried first. loss, gain, many: as in ModeSelector."""
    if loss is not None:
        return _pause(loss, _COST_SHARE)
    return _FIRST_DELAY if many and gain < 1.0 else 0.0
