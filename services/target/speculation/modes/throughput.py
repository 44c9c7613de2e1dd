"""Throughput of the modes at one load: measured, and predicted from steps of other modes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.modes.effects import ModeEffects
from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.prediction import PRIOR_STEPS, predicted
from services.target.speculation.modes.prefill_cost import PrefillCost
from services.target.speculation.modes.trial import Steps

MIN_GAIN = 1.02  # minimum gain of drafts: less may be noise, and costs drafters their time
_DECAY = 0.9  # of a measurement, per trial of any mode since
# Standard deviation of the logarithm of a predicted throughput, and of that of own sources by the steps of a trial that
# have no proposals: a draft on the same cores makes these longer, and texts are harder there.
_PREDICTION_DEVIATION, _RELATION_DEVIATION = 0.1, 0.12


@dataclass(frozen=True)
class Trial:
    """The last trial of a mode, all steps without prompts. ended: seconds at this load; tokens: per session.

    pace: tokens per second of its measured steps
    """

    ended: float
    tokens: float
    seconds: float
    pace: float


@dataclass
class _Measured:
    """All steps of one mode; older trials count less."""

    total: Steps = field(default_factory=Steps)
    trials: int = 0  # of all modes, when this one was measured last; 0 for never
    trial: Trial = Trial(0.0, 0.0, 0.0, 1.0)
    losses: int = 0  # consecutive trials after which it was not the best

    def add(self, trials: int, new: Steps) -> None:
        """Add a trial."""
        self.total.add(new, _DECAY ** (trials - self.trials))
        self.trials = trials


class ModeThroughput:
    """Of the modes at one load, by their trials. mode: that of the present trial"""

    def __init__(
        self,
        modes: Sequence[SpeculationMode],
        prompts: PrefillCost,
        fewer: ModeThroughput | None,
        latency: AnswerLatency | None,
    ) -> None:
        """As of ModeSelector."""
        self._measured = {mode: _Measured() for mode in sorted(modes, key=lambda mode: mode in DRAFT_MODES)}
        self._prompts = prompts
        self._latency = latency or AnswerLatency()
        self._drafted = Steps(drafted=PRIOR_STEPS, accepted=PRIOR_STEPS)  # of all modes, of trials with proposals
        if fewer is not None:
            self._drafted = replace(fewer._drafted)
        self._sessions = 1.0
        self._effects = ModeEffects(modes)
        self.mode = modes[0]

    @property
    def _alone(self) -> SpeculationMode | None:
        """The mode without a draft service, if it may be chosen."""
        return next((mode for mode in self._measured if mode not in DRAFT_MODES), None)

    def _rates(self) -> dict[SpeculationMode, float]:
        """Throughput of the measured modes. Drafts that are never accepted made no trial fast: they count for no more
        than the mode without."""
        rates = {mode: self.throughput(mode) for mode, measured in self._measured.items() if measured.trials}
        alone = math.inf if self._alone is None else rates.get(self._alone, math.inf)
        for mode in rates.keys() & set(DRAFT_MODES):
            if not self._gains(self._measured[mode].total):
                rates[mode] = min(rates[mode], alone)
        return rates

    def _update_accepted(self, new: Steps) -> None:
        """Learn how many draft tokens steps with proposals accept, in any mode, and judge earlier trials by that."""
        measured = {mode: one.total for mode, one in self._measured.items() if one.total.drafted and one.trials}
        before = {mode: self._tokens_of(steps) for mode, steps in measured.items()}
        self._drafted.add(new, _DECAY)
        for mode, steps in measured.items():
            self._effects.scale(mode, self._tokens_of(steps) / before[mode])

    def _expect_first(self) -> None:
        """Before the first trial of a mode with drafts counts: its prediction from the other one's trials."""
        for mode in DRAFT_MODES:
            if mode not in self._measured or not self._measured[mode].trials:
                continue
            if (steps := predicted(self.mode, self._measured[mode].total, self._accepted, self._latency)) is not None:
                self._effects.expect(self.mode, self._pace_predicted(self.mode, mode), _PREDICTION_DEVIATION)
                self._measured[self.mode].total = steps

    def _relate(self, new: Steps) -> None:
        """A trial with drafts also measures own sources on the same text: they draft in its steps without proposals."""
        alone = SpeculationMode.SELF_SPECULATE
        if self.mode not in DRAFT_MODES or alone not in self._measured:
            return
        if (steps := predicted(alone, new, self._accepted, self._latency)) is not None:
            ratio = self._pace_of(steps) / self._pace_of(new)
            self._effects.relate(alone, self.mode, ratio, _RELATION_DEVIATION)

    def throughput(self, mode: SpeculationMode) -> float:
        """Tokens per session and second that a trial would commit now, prompts included."""
        return self._with_prompts(self._effects.rate(mode), mode)

    def _with_prompts(self, pace: float, mode: SpeculationMode) -> float:
        """A throughput, prompts included. pace: the same in steps without prompts."""
        return 1.0 / (1.0 / pace + self._sessions * self._prompts.seconds(mode)) if pace else 0.0

    def _rate_of(self, steps: Steps, mode: SpeculationMode) -> float:
        """Throughput of some steps, prompts included."""
        return self._with_prompts(self._pace_of(steps), mode)

    def _pace_of(self, steps: Steps) -> float:
        """The same without prompts. A step with proposals counts as many accepted draft tokens in all modes."""
        return self._tokens_of(steps) / steps.seconds

    def _tokens_of(self, steps: Steps) -> float:
        return steps.tokens + steps.drafted * self._accepted - steps.accepted

    def _gains(self, steps: Steps) -> bool:
        """Whether proposals let steps commit more than they do without."""
        return self._tokens_of(steps) - steps.own > MIN_GAIN * steps.steps

    @property
    def _accepted(self) -> float:
        """Draft tokens that a step with proposals accepts, in any mode."""
        return self._drafted.accepted / self._drafted.drafted

    def _rate_predicted(self, mode: SpeculationMode, known: SpeculationMode) -> float:
        """Throughput of a mode, prompts included, from that of another one; 0 if nothing is predicted."""
        return self._with_prompts(self._pace_predicted(mode, known), mode)

    def _pace_predicted(self, mode: SpeculationMode, known: SpeculationMode) -> float:
        """The same without prompts."""
        steps = self._measured[known].total
        made = predicted(mode, steps, self._accepted, self._latency)
        return 0.0 if made is None else self._effects.rate(known) * self._pace_of(made) / self._pace_of(steps)
