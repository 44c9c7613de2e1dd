"""The mode selector: how trials at one load choose a mode, and when a losing mode is retried."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import pytest

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.policy import SERVICE_MODES
from services.target.speculation.modes.prefill_cost import PrefillCost
from services.target.speculation.modes.selector import ModeSelector
from services.target.speculation.modes.trial import SETTLING, TRIAL, Steps


def test_trial_length_is_bounded_after_many_trials():
    selector = ModeSelector(
        (SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    assert selector.steps == 4
    selector.trials = 1 << 40
    assert selector.steps == TRIAL


@pytest.mark.parametrize("loser", [SpeculationMode.DRAFT_IF_READY, SpeculationMode.SELF_SPECULATE])
def test_a_losing_mode_is_still_retried(loser):
    selector = ModeSelector((loser, SpeculationMode.NONE), loser, PrefillCost())
    tried = 0
    for _ in range(20_000):
        tried += selector.mode is loser
        seconds = 0.001 * selector.steps * (1.2 if selector.mode is loser else 1.0)
        selector.add_step(selector.steps, seconds)
        selector.end_trial(Steps(selector.steps, seconds))
    assert tried > 600


def test_one_hopeless_draft_mode_delays_the_other():
    selector = ModeSelector(SERVICE_MODES, SpeculationMode.WAIT_FOR_DRAFT, PrefillCost())
    taken = []
    for _ in range(12):
        taken.append(selector.mode)
        tokens, seconds = (1.2, 2.0) if selector.mode is not SpeculationMode.NONE else (1.0, 1.0)
        selector.add_step(TRIAL * tokens, TRIAL * seconds)
        selector.end_trial(Steps(TRIAL * tokens, TRIAL * seconds, TRIAL))
    assert taken == [SpeculationMode.WAIT_FOR_DRAFT] + 11 * [SpeculationMode.NONE]
    assert selector.loss == pytest.approx(TRIAL * (2.0 - 1.2), rel=0.1)


def test_steps_that_do_not_wait_are_not_tried_with_drafters_that_draft_only_meanwhile():
    ahead = False
    selector = ModeSelector(SERVICE_MODES, SpeculationMode.WAIT_FOR_DRAFT, PrefillCost(), drafts_ahead=lambda: ahead)
    seen = []
    for trial in range(400):
        ahead = trial >= 200
        seen.append(selector.mode)
        tokens = {SpeculationMode.WAIT_FOR_DRAFT: 1.5, SpeculationMode.DRAFT_IF_READY: 1.4, SpeculationMode.NONE: 1.3}
        selector.add_step(TRIAL * tokens[selector.mode], TRIAL)
        selector.end_trial(Steps(TRIAL * tokens[selector.mode], TRIAL, TRIAL, drafted=TRIAL, accepted=TRIAL / 2))
    assert set(seen[:200]) == {SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.NONE}
    assert SpeculationMode.DRAFT_IF_READY in seen[200:]


@pytest.mark.parametrize(("gain", "plain"), [(1.01, True), (1.05, False)])
def test_drafts_must_gain_more_than_noise(gain, plain):
    selector = ModeSelector(
        [SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE], SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    modes = []
    for _ in range(200):
        modes.append(selector.mode)
        tokens = TRIAL * (gain if selector.mode is SpeculationMode.DRAFT_IF_READY else 1.0)
        selector.add_step(tokens, TRIAL * 0.02)
        selector.end_trial(Steps(tokens, TRIAL * 0.02, TRIAL))
    best = SpeculationMode.NONE if plain else SpeculationMode.DRAFT_IF_READY
    assert modes[100:].count(best) > 70


@pytest.mark.parametrize("own", [0.0, 1.0])
@pytest.mark.parametrize(("right", "drafts_win"), [(1.0, False), (1.01, False), (1.3, True)])
def test_rejected_drafts_get_no_credit_for_a_fast_trial(right, drafts_win, own):
    """Nor for draft tokens of the target's own sources: `own` are accepted in each step, in either mode."""
    alone = SpeculationMode.SELF_SPECULATE if own else SpeculationMode.NONE
    selector = ModeSelector([SpeculationMode.WAIT_FOR_DRAFT, alone], SpeculationMode.WAIT_FOR_DRAFT, PrefillCost())
    modes = []
    for _ in range(40):
        modes.append(selector.mode)
        drafted = selector.mode is SpeculationMode.WAIT_FOR_DRAFT
        tokens, seconds = (
            (right, 0.9) if drafted else (1.0, 1.0)
        )  # the machine happened to be fast in trials with drafts
        tokens += own
        selector.add_step(TRIAL * tokens, TRIAL * seconds)
        selector.end_trial(Steps(TRIAL * tokens, TRIAL * seconds, TRIAL, TRIAL * own))
    assert modes.count(SpeculationMode.WAIT_FOR_DRAFT if drafts_win else alone) > 30


def test_a_trial_without_tokens_is_the_worst():
    selector = ModeSelector(
        [SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE], SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    selector.add_step(0.0, 1.0)
    selector.end_trial(Steps(0.0, 1.0))
    assert selector.mode is SpeculationMode.NONE
    selector.add_step(1.0, 1.0)
    selector.end_trial(Steps(1.0, 1.0))
    assert selector.mode is SpeculationMode.NONE


def test_luck_with_a_text_is_no_merit_of_a_mode():
    """Both modes had proposals in all steps, of the same length; one of them met an easy stretch of text."""
    modes = [SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY]
    selector = ModeSelector(modes, modes[0], PrefillCost())
    selector.end_trial(Steps(16.0, 0.08, 4, drafted=4, accepted=12.0))
    selector.mode = modes[1]
    selector.end_trial(Steps(4.0, 0.08, 4, drafted=4))
    assert selector.throughput(modes[0]) == pytest.approx(selector.throughput(modes[1]), rel=0.02)
    selector.mode = modes[1]
    selector.end_trial(Steps(4.0, 0.04, 4, drafted=4))
    assert selector.throughput(modes[0]) < 0.9 * selector.throughput(modes[1])
    more = ModeSelector(modes, modes[0], PrefillCost(), selector)
    more.end_trial(Steps(4.0, 0.04, 4, drafted=4))
    assert more.throughput(modes[0]) > 150.0, "more sessions begin with what fewer have shown"


@pytest.mark.parametrize(("latency", "ends"), [(0.004, False), (0.030, True)])
def test_a_trial_ends_early_where_another_mode_with_drafts_is_predicted_to_be_far_ahead(latency, ends):
    answers = AnswerLatency()
    selector = ModeSelector(SERVICE_MODES, SpeculationMode.WAIT_FOR_DRAFT, PrefillCost(), latency=answers)
    one = Steps(2.6, 0.020 + latency, 1, drafted=1, accepted=1.6, held=latency)
    assert not selector.hopeless(one), "no answer has been measured"
    answers.asked(1, 10, 0.0, held=True)
    answers.answered(1, 10, latency)
    assert selector.hopeless(one) is ends
    selector.add_step(one.tokens, one.seconds)
    selector.end_trial(one)
    taken = []
    for _ in range(2):
        taken.append(selector.mode)
        plain = selector.mode is SpeculationMode.NONE
        new = Steps(2.0, 0.040, 2) if plain else Steps(6.0, 0.080, 4, drafted=2, accepted=2)
        selector.add_step(new.tokens, new.seconds)
        selector.end_trial(new)
    assert taken[0] is SpeculationMode.NONE
    assert (taken[1] is SpeculationMode.DRAFT_IF_READY) is ends


class Texts:
    """Steps on answers of which some are easy for own sources and some hard. slow: factor of steps with drafts."""

    def __init__(self, seed: int, slow: float, service: float) -> None:
        self._draw, self._slow, self._service = random.Random(seed), slow, service
        self._left, self._level = 0, 0.0

    def step(self, mode: SpeculationMode) -> Steps:
        """One step: 12 ms with proposals, 30 ms with a chain of own draft tokens; 4 ms more where it waits."""
        draw = self._draw
        self._left -= 1
        if self._left < 0:
            self._left, self._level = 30, draw.gauss(1.4, 1.0)
        chance = 1.0 / (1.0 + math.exp(-self._level - 0.5 * draw.gauss(0.0, 1.0)))
        share = {SpeculationMode.WAIT_FOR_DRAFT: self._service, SpeculationMode.DRAFT_IF_READY: 0.4 * self._service}
        drafted = draw.random() < share.get(mode, 0.0)
        most, right = (8, 0.7) if drafted else (5, chance)
        accepted = next((n for n in range(most) if draw.random() >= right), most)
        seconds = (0.012 if drafted else 0.030) * draw.uniform(0.97, 1.05)
        seconds *= self._slow if mode in DRAFT_MODES else 1.0
        held = 0.004 * (mode is SpeculationMode.WAIT_FOR_DRAFT)
        parts = (0.0, 1.0, accepted, held, seconds) if drafted else (accepted, 0.0, 0.0, held, 0.0)
        return Steps(1.0 + accepted, seconds + held, 1.0, *parts)


MODES = (*DRAFT_MODES, SpeculationMode.SELF_SPECULATE)


def rate_of(texts: Texts, modes: Sequence[SpeculationMode], seconds: float) -> float:
    """Tokens per second of a selector that begins as a service does: its very first trial is slow."""
    latency = AnswerLatency()
    latency.asked(1, 1, 0.0, held=True)
    latency.answered(1, 1, 0.006)
    selector = ModeSelector(modes, modes[-1], PrefillCost(), latency=latency)
    time = tokens = 0.0
    before = None
    while time < seconds:
        mode, trial = selector.mode, Steps()
        for number in range(-SETTLING if mode is not before else 0, selector.steps):
            new = texts.step(mode)
            new = replace(new, seconds=2.0 * new.seconds) if selector.trials == 0 else new
            time, tokens = time + new.seconds, tokens + new.tokens
            selector.add_step(new.tokens, new.seconds)
            if number >= 0:
                trial.add(new)
        selector.end_trial(trial)
        before = mode
    return tokens / time


@pytest.mark.parametrize(
    ("slow", "service", "best"),
    [
        (1.15, 0.1, SpeculationMode.SELF_SPECULATE),
        (1.05, 0.05, SpeculationMode.SELF_SPECULATE),
        (1.0, 0.8, SpeculationMode.WAIT_FOR_DRAFT),
    ],
)
def test_the_better_of_own_sources_and_the_draft_service_is_found_under_texts_that_differ_more(slow, service, best):
    """An unlucky first trial, at the start of a service, costs no more than a tenth of the first twenty seconds."""
    alone = {mode: mean(rate_of(Texts(seed, slow, service), [mode], 60) for seed in range(10)) for mode in MODES}
    assert max(alone, key=lambda mode: alone[mode]) is best
    chosen = mean(rate_of(Texts(100 + seed, slow, service), MODES, 20) for seed in range(30))
    assert chosen > 0.9 * alone[best]
