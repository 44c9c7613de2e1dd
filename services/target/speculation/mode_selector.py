"""Speculation modes, measured against one another at one load.

Whether a draft service pays can only be measured: on shared cores it slows the target down, by an amount that no model
predicts. What counts is the time that a token takes: in steps that sample tokens alone, and as its share of prompts,
which take longer where a drafter reads them, too. Each mode has a trial now and then, because texts, drafters and load
change. The cost of a trial beside the best mode, with all that a drafter has to catch up on first, decides when the
mode is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.estimates.in_time import share_in_time
from services.target.speculation.estimates.mode_trial import SETTLING, Steps

TRIAL = 16  # measured steps of a trial; the first trials at a load are shorter, so that a losing mode ends soon
_FIRST_TRIAL = TRIAL // 4
_DOUBLINGS = (TRIAL // _FIRST_TRIAL).bit_length() - 1
_SHORT_TRIAL = TRIAL // 2  # of a mode that is far behind
_FAR_BEHIND = 0.9  # of the best mode's throughput
# A losing mode is retried when its last trial's cost is at most this share of the time since. The worse of two modes
# with drafts waits longer where plain steps are best: it hardly wins if the better one does not.
_COST_SHARE = 0.005
_COST_SHARE_OF_WORST = _COST_SHARE / 4
_MIN_PAUSE_TRIALS = 16  # of the mode's own trials
_MAX_PAUSE = 300.0  # seconds
# A trial may go wrong for reasons outside its mode, such as a program that is compiled or a process that starts. So a
# mode is given up for long only after several losses: its first pause is at most one second, or 16 trials of the
# best mode, each further one this many times as long. More losses than _MAX_LOSSES lead beyond the longest pause.
_FIRST_PAUSE, _PAUSE_GROWTH = 1.0, 4.0
_MAX_LOSSES = math.ceil(math.log(_MAX_PAUSE / _FIRST_PAUSE, _PAUSE_GROWTH))
_FIRST_DELAY = 30.0  # seconds that a load lasts before drafts are tried where a trial costs about one second
_GAIN_LOSS = 1.5  # factor by which the gain of drafts shrinks with twice as many sessions
_MIN_GAIN = 1.02  # minimum gain of drafts: less may be noise, and costs drafters their time
_DECAY, _MIN_DECAY = 0.9, 0.3  # of a measurement, per trial of any mode since, and at most between two of its own
# Steps with proposals for which it counts that they accept one draft token: the first few may meet a hard line of text.
_PRIOR_STEPS = 4.0
_PROMPT_DECAY = 0.98  # of the cost of prompts, per step that computes some in the same mode
_PROMPT_PRIOR = 512  # prompt tokens for which the average over all modes counts


class SpeculationMode(Enum):
    """What steps do about draft tokens."""

    WAIT_FOR_DRAFT = auto()  # hold the step until proposals arrive, within a bound
    DRAFT_IF_READY = auto()  # verify the proposals that are there
    # In both, the target's own sources draft where no proposal is predicted to bring more.
    SELF_SPECULATE = auto()  # draft with the target's own sources where they are predicted to pay
    NONE = auto()  # decode plainly


DRAFT_MODES = (SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY)  # those with a draft service


class PrefillCost:
    """Seconds of a prompt token, where drafters read prompts, too, and where not; and prompt tokens per new token.

    Prompts of one trial may be twice as expensive as those of another, so modes with drafts are one class here.
    """

    def __init__(self) -> None:
        self._tokens = {True: 0.0, False: 0.0}  # by whether drafters read them
        self._seconds = {True: 0.0, False: 0.0}
        self._reading = 0.0  # seconds for which steps were held while drafters read prompts
        self._all_tokens = 0.0
        self._committed = 0.0  # for as long as prompt tokens are remembered

    def observe(self, mode: SpeculationMode, tokens: int, seconds: float) -> None:
        """Add a step. seconds: of its prompt tokens."""
        drafted = mode in DRAFT_MODES
        self._tokens[drafted] = self._tokens[drafted] * _PROMPT_DECAY + tokens
        self._seconds[drafted] = self._seconds[drafted] * _PROMPT_DECAY + seconds
        self._reading *= _PROMPT_DECAY if drafted else 1.0
        self._all_tokens = self._all_tokens * _PROMPT_DECAY + tokens
        self._committed *= _PROMPT_DECAY

    def held(self, seconds: float) -> None:
        """A step was held for drafters that read prompts, which belongs to the cost of these."""
        self._reading += seconds

    @property
    def seconds_per_prompt_token(self) -> float:
        """Seconds in which the target computes a prompt token, in all modes; 0 before one was computed."""
        tokens = sum(self._tokens.values())
        return sum(self._seconds.values()) / tokens if tokens else 0.0

    @property
    def prompt_tokens_per_token(self) -> float:
        """Prompt tokens for each new token."""
        return self._all_tokens / self._committed if self._committed else 0.0

    def committed(self, tokens: int) -> None:
        """Add committed tokens of all sessions."""
        self._committed += tokens

    def seconds(self, mode: SpeculationMode) -> float:
        """A new token's share of prompts in a mode, in seconds."""
        tokens = sum(self._tokens.values())
        if not tokens or not self._committed:
            return 0.0
        average = sum(self._seconds.values()) / tokens
        drafted = mode in DRAFT_MODES
        own = self._seconds[drafted] + (self._reading if drafted else 0.0)
        each = (own + _PROMPT_PRIOR * average) / (self._tokens[drafted] + _PROMPT_PRIOR)
        return each * self._all_tokens / self._committed


@dataclass(frozen=True)
class _Trial:
    """The last trial of a mode, all steps without prompts. ended: seconds at this load; tokens: per session."""

    ended: float
    tokens: float
    seconds: float


@dataclass
class _Measured:
    """All steps of one mode; older trials count less."""

    total: Steps = field(default_factory=Steps)
    trials: int = 0  # of all modes, when this one was measured last; 0 for never
    trial: _Trial = _Trial(0.0, 0.0, 0.0)
    retry_soon: bool = False  # the last trial beat the incumbent; retry soon, because the average lags
    losses: int = 0  # consecutive trials after which it was not the best

    def add(self, trials: int, new: Steps) -> None:
        """Add a trial."""
        self.total.add(new, max(_DECAY ** (trials - self.trials), _MIN_DECAY))
        self.trials = trials


class ModeSelector:
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
    ) -> None:
        """first: the mode to begin with. fewer: the selector of fewer sessions, which have more to gain than these.

        doublings: from their number to this one's. latency: of a draft's answers. many: a first trial with drafts has
        many prompts to read, or expensive trees; the load must last for a while to be worth that, unless fewer sessions
        gained much.
        """
        self._measured = {mode: _Measured() for mode in sorted(modes, key=lambda mode: mode in DRAFT_MODES)}
        self._prompts = prompts
        self._latency = latency or AnswerLatency()
        self.trials = 0
        self._elapsed = 0.0  # seconds in steps
        self._since = Steps()  # the last trial's end: all steps, measured or not
        self._drafted = Steps(drafted=_PRIOR_STEPS, accepted=_PRIOR_STEPS)  # of all modes, of trials with proposals
        if fewer is not None:
            self._drafted = replace(fewer._drafted)
        self._short = False
        self._sessions = 1.0
        self.probes = True
        self.loss: float | None = fewer.loss if fewer is not None else None
        self.gain: float = fewer.gain / _GAIN_LOSS**doublings if fewer is not None else 0.0
        self._first_pause = _FIRST_DELAY if many else _FIRST_PAUSE
        self._delay = 0.0 if self._alone is None else _first_delay(self.loss, self.gain, many=many)
        self.mode = self._alone if self._delay and first in DRAFT_MODES and self._alone is not None else first

    @property
    def _alone(self) -> SpeculationMode | None:
        """The mode without a draft service, if it may be chosen."""
        return next((mode for mode in self._measured if mode not in DRAFT_MODES), None)

    @property
    def steps(self) -> int:
        """Length of the present trial: short at first, so that a losing mode ends soon."""
        doublings = min(self.trials // len(self._measured), _DOUBLINGS)
        if not self._measured[self.mode].trials:
            if self.mode is SpeculationMode.NONE:
                return _FIRST_TRIAL // 2  # each step commits a token: nothing but its time is unknown
            doublings = 0 if self._short else doublings
        return min(_FIRST_TRIAL << doublings, _SHORT_TRIAL if self._short else TRIAL)

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
        after_delay = self._delay > 0.0 and self.mode in DRAFT_MODES and not present.trials
        if self.mode in DRAFT_MODES and not present.trials:
            others = (self._measured[mode].total for mode in DRAFT_MODES if mode in self._measured)
            present.total = next(filter(None, (self._predicted(self.mode, steps) for steps in others)), present.total)
        present.add(self.trials, new)
        present.trial = _Trial(self._elapsed, self._since.tokens, self._since.seconds)
        self._since = Steps()
        self._sessions = sessions
        if new.drafted:
            self._drafted.add(new, _DECAY)
        rates = self._rates()
        best = max(rates, key=lambda mode: rates[mode] * (1.0 if mode in DRAFT_MODES else _MIN_GAIN))
        # After a delay, drafts are chosen by scores that are not calibrated yet, and the next trial may be a quarter of
        # a minute away: a first trial that is not far behind is followed by another one.
        threshold = _FAR_BEHIND if after_delay and self.mode is not best else 1.0
        rate = self._rate_of(new, self.mode) if self._gains(new) else 0.0
        present.retry_soon = rate > threshold * rates[best]
        present.losses = present.losses + 1 if self.mode is not best and not present.retry_soon else 0
        self._update_gain(rates)
        due = [mode for mode in self._measured if mode is not best and self._due(mode, rates, best) <= self._elapsed]
        self.mode = due[0] if due else best
        self.probes = bool(due) and not self._measured[self.mode].retry_soon
        expected = rates.get(self.mode) or self._rate_predicted(self.mode, self._measured[best].total) or math.inf
        self._short = self.mode is not best and expected < _FAR_BEHIND * rates[best]

    def _rates(self) -> dict[SpeculationMode, float]:
        """Throughput of the measured modes. Drafts that are never accepted made no trial fast: they count for no more
        than the mode without."""
        rates = {mode: self.throughput(mode) for mode, measured in self._measured.items() if measured.trials}
        alone = math.inf if self._alone is None else rates.get(self._alone, math.inf)
        for mode in rates.keys() & set(DRAFT_MODES):
            if not self._gains(self._measured[mode].total):
                rates[mode] = min(rates[mode], alone)
        return rates

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
        if measured.retry_soon:
            return measured.trial.ended
        worst = best not in DRAFT_MODES and len(drafted) > 1 and rates[mode] == min(rates.values())
        lost = self._trial_cost(mode, max(rates.values()))
        pause = _pause(lost, _COST_SHARE_OF_WORST if worst else _COST_SHARE, measured.trial.seconds)
        first = max(self._first_pause, _MIN_PAUSE_TRIALS * self._measured[best].trial.seconds)
        losses = min(max(measured.losses - 1 + worst, 0), _MAX_LOSSES)
        if self._is_explained(mode, rates, best):
            losses = _MAX_LOSSES
        return measured.trial.ended + min(pause, first * _PAUSE_GROWTH**losses)

    def _is_explained(self, mode: SpeculationMode, rates: dict[SpeculationMode, float], best: SpeculationMode) -> bool:
        """True if a mode is far behind, and not for want of luck: it is predicted to be, from the steps of the best."""
        predicted = self._rate_predicted(mode, self._measured[best].total) if best in DRAFT_MODES else 0.0
        return predicted > 0.0 and max(predicted, rates[mode]) < _FAR_BEHIND * rates[best]

    def _first_due(self, mode: SpeculationMode, rates: dict[SpeculationMode, float], best: SpeculationMode) -> float:
        """When a mode has its first trial."""
        drafted = [other for other in rates if other in DRAFT_MODES]
        if mode not in DRAFT_MODES:  # drafters have nothing to catch up on
            return 0.0
        if not drafted:
            return self._delay
        known = self._measured[drafted[-1]].total
        untried = [other for other in self._measured if other not in rates]
        predicted = {other: self._rate_predicted(other, known) for other in untried}
        if predicted[mode]:
            lost = 1.0 - predicted[mode] / max(rates[best], *predicted.values())
            pause = _pause((self.steps + SETTLING) * known.seconds / known.steps * lost, _COST_SHARE)
            return min(pause, self._first_pause * _PAUSE_GROWTH)  # as after two losses: it may be wrong
        if self.loss is None:
            return self._delay
        latest = max(self._measured[other].trial.ended for other in drafted)
        return latest + _pause(self.loss, _COST_SHARE_OF_WORST)

    def _trial_cost(self, mode: SpeculationMode, rate: float) -> float:
        """Seconds that a mode's last trial cost beside a throughput, in tokens per session and second."""
        trial = self._measured[mode].trial
        prompts = self._sessions * self._prompts.seconds(mode)
        return trial.seconds + trial.tokens * (prompts - 1.0 / rate) if rate else 0.0

    def throughput(self, mode: SpeculationMode) -> float:
        """Tokens per session and second, prompts included."""
        return self._rate_of(self._measured[mode].total, mode)

    def _rate_of(self, steps: Steps, mode: SpeculationMode) -> float:
        """The same of some steps. Of a step with proposals all modes accept as many draft tokens: texts differ more."""
        tokens = self._tokens_of(steps)
        return 1.0 / (steps.seconds / tokens + self._sessions * self._prompts.seconds(mode)) if tokens else 0.0

    def _tokens_of(self, steps: Steps) -> float:
        return steps.tokens + steps.drafted * self._accepted - steps.accepted

    def _gains(self, steps: Steps) -> bool:
        """Whether proposals let steps commit more than they do without."""
        return self._tokens_of(steps) - steps.own > _MIN_GAIN * steps.steps

    @property
    def _accepted(self) -> float:
        """Draft tokens that a step with proposals accepts, in any mode."""
        return self._drafted.accepted / self._drafted.drafted

    def _predicted(self, mode: SpeculationMode, steps: Steps) -> Steps | None:
        """A few steps of a mode, from those of another one with drafts and the time of answers; None if these say
        nothing of it. Drafting beside the target is taken to cost it nothing."""
        if not steps.steps:
            return None
        step, own = (steps.seconds - steps.held) / steps.steps, steps.own / steps.steps
        drafted = held = 0.0
        if mode is not SpeculationMode.NONE:
            if mode not in DRAFT_MODES or not self._latency.count:
                return None
            drafted, held = 1.0, self._latency.held_seconds
        if mode is SpeculationMode.DRAFT_IF_READY:
            drafted, held = share_in_time(self._accepted, step, self._latency.seconds), 0.0
        accepted = drafted * self._accepted
        predicted = Steps()
        predicted.add(Steps(1.0 + own + accepted, step + held, 1.0, own, drafted, accepted, held), scale=_PRIOR_STEPS)
        return predicted

    def _rate_predicted(self, mode: SpeculationMode, steps: Steps) -> float:
        """Its throughput; 0 if nothing is predicted."""
        predicted = self._predicted(mode, steps)
        return 0.0 if predicted is None else self._rate_of(predicted, mode)

    def hopeless(self, steps: Steps) -> bool:
        """True if the present trial may end with these steps: by them a mode with drafts that had none is far ahead."""
        if self.mode not in DRAFT_MODES:
            return False
        others = [mode for mode in DRAFT_MODES if mode is not self.mode and mode in self._measured]
        others = [mode for mode in others if not self._measured[mode].trials]
        rates = [self._rate_predicted(mode, steps) for mode in others]
        return bool(rates) and self._rate_of(steps, self.mode) < _FAR_BEHIND * max(rates)


def _pause(lost: float, share: float, trial: float = 0.0) -> float:
    """Seconds after which a mode may be tried again. lost: seconds that a trial costs; trial: its length in seconds."""
    return min(max(lost / share, _MIN_PAUSE_TRIALS * trial), _MAX_PAUSE)


def _first_delay(loss: float | None, gain: float, *, many: bool) -> float:
    """Seconds after which drafts are tried first. loss, gain, many: as in ModeSelector."""
    if loss is not None:
        return _pause(loss, _COST_SHARE)
    return _FIRST_DELAY if many and gain < 1.0 else 0.0
