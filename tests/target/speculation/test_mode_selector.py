"""The mode selector: how trials at one load choose a mode, and when a losing mode is retried."""

import pytest

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.estimates.mode_trial import Steps
from services.target.speculation.mode_policy import SERVICE_MODES
from services.target.speculation.mode_selector import TRIAL, ModeSelector, PrefillCost, SpeculationMode


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
        selector.add_step(tokens, seconds)
        selector.end_trial(Steps(tokens, seconds))
    assert taken == [SpeculationMode.WAIT_FOR_DRAFT] + 11 * [SpeculationMode.NONE]
    assert selector.loss == pytest.approx(2.0 - 1.2)


@pytest.mark.parametrize(("gain", "plain"), [(1.01, True), (1.05, False)])
def test_drafts_must_gain_more_than_noise(gain, plain):
    selector = ModeSelector(
        [SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE], SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    for _ in range(4):
        tokens = gain if selector.mode is SpeculationMode.DRAFT_IF_READY else 1.0
        selector.add_step(tokens, 1.0)
        selector.end_trial(Steps(tokens, 1.0))
    assert (selector.mode is SpeculationMode.NONE) == plain


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
    assert selector.throughput(modes[0]) == pytest.approx(selector.throughput(modes[1]))
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
