"""What changes with each constant of the speculation modes."""

import random

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.modes.effects import ModeEffects
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.modes.policy import SERVICE_MODES, ModePolicy
from services.target.speculation.modes.prediction import predicted, variances
from services.target.speculation.modes.prefill_cost import PrefillCost
from services.target.speculation.modes.selector import ModeSelector
from services.target.speculation.modes.trial import ModeTrial, Steps
from tests.support.constants import constant_tests
from tests.support.target.virtual_time.drafter_clock import Clock
from tests.support.target.virtual_time.link_replay import Link, Replay

PACKAGE = "services.target.speculation.modes"
WAIT, READY, ITSELF, NONE = SpeculationMode

# --- trials and predictions ---


def latency_of(seconds):
    latency = AnswerLatency()
    latency.asked(1, 1, 0.0, held=True)
    latency.answered(1, 1, seconds)
    return latency


def prediction(mode):
    """A few steps of a mode, from 20 steps with drafts of which 3 had no proposals."""
    known = Steps(60.0, 0.5, 20.0, own=4.0, drafted=17.0, accepted=30.0, held=0.1, drafted_seconds=0.35)
    return predicted(mode, known, 1.5, latency_of(0.01))


def variance():
    return variances(8.0, Steps(60.0, 0.5, 20.0, own=10.0, drafted=12.0), 1.5, 1.0)


def measured_trial(*seconds):
    """Seconds and steps of a trial that settles, of steps that take as long as these."""
    trial = ModeTrial()
    trial.start(settles=True)
    for one in seconds:
        trial.add(NONE, Steps(1.0, one, 1.0))
    return trial.total


def prompt_cost():
    """A new token's share of prompts, after prompts became slow where drafters read them."""
    cost = PrefillCost()
    for number in range(40):
        cost.observe(WAIT if number % 2 else NONE, 100, 0.03 if number > 30 and number % 2 else 0.01)
        cost.committed(30)
    return cost.seconds(WAIT)


def compared(surprise=1.0):
    """The ratio of two modes' throughput after trials of both. surprise: factor of the last one."""
    effects, draw = ModeEffects([WAIT, NONE]), random.Random(1)
    for number in range(8):
        mode = (WAIT, NONE)[number % 2]
        rate = (30.0 if mode is WAIT else 20.0) * draw.uniform(0.9, 1.1) * (surprise if number == 7 else 1.0)
        effects.observe(mode, rate, 0.01, 0.01, 30.0)
    return effects.rate(WAIT) / effects.rate(NONE)


# --- the selector ---


class Trials:
    """Trials of one load, whose modes have given tokens per step and seconds of a step; chance differs by trial."""

    def __init__(self, rates, *, modes=None, deviation=0.0, proposals=None, **options):
        modes = list(rates) if modes is None else modes
        self.selector = ModeSelector(modes, modes[0], PrefillCost(), latency=latency_of(0.004), **options)
        self._rates, self._deviation, self._draw = rates, deviation, random.Random(3)
        self._proposals = proposals or {}
        self.begun = []  # modes, and the seconds at which their trials begin
        self.now = 0.0

    def run(self, seconds):
        """The trials of that many seconds."""
        while self.now < seconds:
            self.step()
        return self.begun

    def step(self):
        """One trial."""
        selector = self.selector
        mode, steps = selector.mode, selector.steps
        if not self.begun or self.begun[-1][0] is not mode:
            self.begun.append((mode, round(self.now, 6)))
        tokens, each = self._rates[mode]
        tokens *= steps * self._draw.lognormvariate(0.0, self._deviation)
        share = self._proposals.get(mode, 0.0)
        drafted, accepted = share * steps, share * max(tokens - steps, 0.0)
        own = 0.0 if mode is NONE else max(tokens - steps - accepted, 0.0) * (mode is ITSELF or not share)
        selector.add_step(tokens, steps * each)
        total = Steps(tokens, steps * each, steps, own, drafted, accepted, 0.0, drafted * each)
        selector.end_trial(total)
        self.now += steps * each


def losing_draft(**options):
    """Modes beside a draft service that is far behind plain decoding."""
    return Trials({WAIT: (1.2, 0.02), READY: (1.1, 0.018), NONE: (1.0, 0.01)}, **options)


def close_modes():
    """Modes that differ by less than their trials."""
    return Trials(
        {WAIT: (2.2, 0.022), READY: (1.9, 0.02), ITSELF: (2.0, 0.02)},
        deviation=0.15,
        proposals={WAIT: 0.9, READY: 0.6},
    )


def more_sessions(gain=3.0):
    """When drafts are tried first with eight sessions, after they had a gain with one."""
    few = Trials({WAIT: (gain, 0.01), NONE: (1.0, 0.01)}, many=False)
    few.run(5.0)
    many = Trials({WAIT: (gain, 0.01), NONE: (1.0, 0.01)}, many=True, fewer=few.selector, doublings=3)
    return many.selector.gain, many.run(60.0)[:2]


def shortest_trial():
    """Lengths of the first trials of a mode."""
    trials = Trials({READY: (1.5, 0.01), NONE: (1.0, 0.01)})
    lengths = []
    for _ in range(12):
        lengths.append(trials.selector.steps)
        trials.step()
    return lengths


def least_gain():
    """Gains of drafts, in percent, at which they are chosen."""
    chosen = []
    for percent in range(8):
        trials = Trials({READY: (1.0 + percent / 100, 0.01), NONE: (1.0, 0.01)}, proposals={READY: 1.0})
        trials.run(20.0)
        chosen.append(trials.begun[-1][0])
    return chosen


# --- the policy ---


def modes_of_loads():
    """The mode with which a load begins, by number of sessions."""
    modes = []
    for sessions in (1, 2, 4, 8, 16, 32):
        policy = ModePolicy(clock=Clock())
        policy.received(1, fresh=True)
        policy.begin(sessions)
        modes.append(policy.mode)
    return modes


def steps_before_giving_up():
    """Steps of a mode with drafts that is kept without an answer."""
    clock = Clock()
    policy = ModePolicy((READY, NONE), clock)
    policy.received(0, fresh=True)
    steps = 0
    while policy.mode is READY and steps < 1000:
        policy.begin(1)
        clock.now += 0.03
        policy.end([steps + 1], 1, 1)
        steps += 1
    return steps


def modes_beside_a_network():
    """Modes of the steps of several answers, with a draft that is two steps away."""
    clock = Clock()
    replay = Replay(ModePolicy(SERVICE_MODES, clock), clock, Link(step=0.020, latency=0.046))
    for _ in range(4):
        replay.answer(128)
    return replay.modes


EFFECTS = {
    "effects:_PRIOR_DEVIATION": compared,
    "effects:_WALK": compared,
    "effects:_MAX_SURPRISE": lambda: compared(surprise=6.0),
    "prefill_cost:_PROMPT_DECAY": prompt_cost,
    "prefill_cost:_PROMPT_PRIOR": prompt_cost,
    "prediction:PRIOR_STEPS": lambda: prediction(READY),
    "prediction:_RUNS": variance,
    "prediction:_PACE_NOISE": variance,
    "prediction:_OWN_WALK": variance,
    "selector:_FIRST_TRIAL": shortest_trial,
    "selector:_FAR_BEHIND": lambda: [
        Trials({READY: (1.0, 0.01 * (1 + p / 50)), NONE: (1.0, 0.01)}).run(30.0) for p in range(10)
    ],
    "selector:_COST_SHARE": lambda: losing_draft().run(200.0),
    "selector:_DOUBT_SHARE": lambda: close_modes().run(60.0),
    "selector:_MIN_PAUSE_TRIALS": lambda: Trials({READY: (1.0, 0.01), NONE: (1.0, 0.01)}).run(60.0),
    "selector:_MAX_PAUSE": lambda: Trials({WAIT: (1.0, 2.0), NONE: (1.0, 0.5)}).run(4000.0),
    "selector:_FIRST_PAUSE": lambda: close_modes().run(60.0),
    "selector:_PAUSE_GROWTH": lambda: losing_draft().run(200.0),
    "selector:_FIRST_DELAY": lambda: losing_draft(many=True).run(200.0),
    "selector:_GAIN_LOSS": more_sessions,
    "throughput:MIN_GAIN": least_gain,
    "throughput:_DECAY": lambda: close_modes().run(60.0),
    "throughput:_PREDICTION_DEVIATION": modes_beside_a_network,
    "throughput:_RELATION_DEVIATION": lambda: close_modes().run(200.0),
    "trial:TRIAL": lambda: losing_draft().run(200.0),
    "trial:SETTLING": lambda: measured_trial(*[0.1] * 4, *[0.01] * 20),
    "policy:_UNANSWERED_TRIALS": steps_before_giving_up,
    "policy:_MANY": modes_of_loads,
}
FIXED = {
    "effects:_LEVEL_DEVIATION": "any number far above the logarithm of a throughput stands for unknown",
    "selector:_DOUBLINGS": "follows from two others",
    "selector:_MAX_LOSSES": "follows from three others",
}

test_a_constant_has_an_effect, test_all_constants_are_explained_and_tested = constant_tests(
    {PACKAGE: EFFECTS}, {PACKAGE: FIXED}, whole=[PACKAGE]
)
