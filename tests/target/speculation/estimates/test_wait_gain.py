"""For which sessions waiting pays, by the measured delay of each one's draft, step time, and what answers hold."""

import pytest

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.estimates.wait_gain import WaitGain


def measured(step, latencies, accepted=1.6, useful=(1.0,)):
    """After steps that waited for the answers of some sessions, which accepted as many draft tokens on average.

    useful: share of each session's answers that hold draft tokens
    """
    answers = AnswerLatency()
    gain, now, due = WaitGain(answers), 0.0, 0.0
    useful = useful * len(latencies) if len(useful) == 1 else useful
    for number in range(40):
        for one, latency in enumerate(latencies):
            holds = int((number + 1) * useful[one]) > int(number * useful[one])
            answers.asked(one, number, now, held=True)
            answers.answered(one, number, now + latency, useful=holds)
            gain.answered(one)
        now += max(latencies) + step
        due += accepted
        whole, due = int(due), due - int(due)
        gain.committed(now, dict.fromkeys(range(len(latencies)), whole), len(latencies) * (whole + 1))
    return gain


@pytest.mark.parametrize(
    ("step", "latency", "promised", "pays"),
    [
        (0.020, 0.003, 0.0, True),
        (0.020, 0.003, 1.2, True),  # 0.4 tokens more against 0.34 in the time of the answer
        (0.020, 0.003, 1.4, False),
        (0.020, 0.013, 0.4, True),
        (0.020, 0.013, 0.8, False),  # as far away as this, even a middling tree is better at once
        (0.040, 0.013, 0.8, True),  # ... unless the target's step is long
        (0.040, 0.013, 1.2, False),
        (0.020, 0.043, 0.0, False),
        (0.020, 0.006, None, True),  # 0.8 tokens more than the next step has by chance, against 0.6
        (0.020, 0.016, None, False),  # the same against 1.16
        (0.040, 0.016, None, True),
        (0.040, 0.046, None, False),
    ],
)
def test_waiting_pays_by_delay_and_step_time(step, latency, promised, pays):
    assert measured(step, [latency]).worth({0: promised}, step) == ({0} if pays else set())


def test_one_session_without_draft_tokens_may_be_worth_the_time_of_all():
    gain = measured(0.020, [0.003] * 3)
    assert not gain.worth({0: 1.4, 1: 1.4, 2: 1.4}, 0.020)
    assert 2 in gain.worth({0: 1.4, 1: 1.4, 2: 0.0}, 0.020)


@pytest.mark.parametrize(
    ("near", "far", "awaited"), [(0.004, 0.024, {0}), (0.004, 0.005, {0, 1}), (0.024, 0.024, set())]
)
def test_each_session_is_weighed_by_its_own_distance(near, far, awaited):
    """The mean of 14 ms would let a step of 20 ms wait for neither, or for both."""
    assert measured(0.020, [near, far]).worth({0: None, 1: None}, 0.020) == awaited


@pytest.mark.parametrize(("useful", "pays"), [(1.0, True), (0.5, True), (0.05, False)])
def test_answers_that_are_mostly_empty_are_not_worth_the_time(useful, pays):
    gain = measured(0.033, [0.003], useful=(useful,))
    assert gain.worth({0: None}, 0.033) == ({0} if pays else set())


def test_only_the_session_with_useful_answers_is_waited_for():
    gain = measured(0.020, [0.003, 0.006], useful=(1.0, 0.05))
    assert gain.worth({0: None, 1: None}, 0.020) == {0}


def test_answers_no_better_than_the_targets_own_drafts_are_not_worth_the_time():
    gain = measured(0.020, [0.003])
    assert gain.worth({0: None}, 0.020) == {0}
    for _ in range(20):
        gain.committed(100.0, {}, 0, own=[1, 2])
    assert not gain.worth({0: None}, 0.020)


def test_waiting_pays_until_enough_is_known():
    gain = WaitGain(AnswerLatency())
    assert gain.worth({1: 5.0}, 0.020) == {1}
    gain.answered(1)
    gain.committed(0.0, {1: 0}, 1)
    assert gain.worth({1: 5.0}, 0.020) == {1}


def test_drafts_that_were_useless_are_hoped_for_again():
    gain = measured(0.020, [0.003], accepted=0.0)
    assert not gain.worth({0: None}, 0.020)
    now = gain._last
    for _ in range(20):
        now += 0.020
        gain.committed(now, {}, 1)
    assert gain.worth({0: None}, 0.020) == {0}, "a hundred times the latency later"
    gain.answered(0)
    gain.committed(now + 0.02, {0: 0}, 1)
    assert not gain.worth({0: None}, 0.020)


def test_pauses_do_not_count():
    gain = measured(0.020, [0.003])
    gain.committed(100.0, {0: 0}, 1)  # a minute without a request is no step
    gain.answered(0)
    gain.committed(100.02, {0: 2}, 3)
    assert gain.worth({0: 1.2}, 0.020)
    assert not gain.worth({0: 1.4}, 0.020)
