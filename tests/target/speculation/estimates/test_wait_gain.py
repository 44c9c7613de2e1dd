"""When waiting for an answer pays beside draft tokens that survived, by measured delay and step time."""

import pytest

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.estimates.wait_gain import WaitGain


def measured(step, latency, accepted=1.6, sessions=1):
    """After steps that waited for their answers, and accepted as many draft tokens on average."""
    answers = AnswerLatency()
    gain, now, due = WaitGain(answers), 0.0, 0.0
    for number in range(40):
        for one in range(sessions):
            answers.asked(one, number, now, held=True)
            answers.answered(one, number, now + latency)
            gain.answered(one)
        now += latency + step
        due += accepted
        whole, due = int(due), due - int(due)
        gain.committed(now, dict.fromkeys(range(sessions), whole), sessions * (whole + 1))
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
    ],
)
def test_waiting_pays_by_delay_and_step_time(step, latency, promised, pays):
    assert measured(step, latency).pays([promised]) is pays


def test_one_session_without_draft_tokens_may_be_worth_the_time_of_all():
    gain = measured(0.020, 0.003, sessions=3)
    assert not gain.pays([1.4, 1.4, 1.4])
    assert gain.pays([1.4, 1.4, 0.0])


def test_waiting_pays_until_enough_is_known():
    gain = WaitGain(AnswerLatency())
    assert gain.pays([5.0])
    gain.answered(1)
    gain.committed(0.0, {1: 0}, 1)
    assert gain.pays([5.0])


def test_pauses_do_not_count():
    gain = measured(0.020, 0.003)
    gain.committed(100.0, {0: 0}, 1)  # a minute without a request is no step
    assert gain.pays([1.2])
    assert not gain.pays([1.4])
