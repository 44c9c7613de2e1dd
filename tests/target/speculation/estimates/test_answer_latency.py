"""The time from a commit to its answer, in modes that wait and in those that do not."""

import pytest

from services.target.speculation.draft_wait import DraftWait
from services.target.speculation.estimates.answer_latency import AnswerLatency
from tests.support.target.virtual_time.drafter_clock import Clock


def test_answers_count_from_their_own_commits_though_further_ones_followed():
    latency = AnswerLatency()
    for number in range(8):
        now = 0.020 * number
        latency.asked(1, number, now, held=False)
        if number >= 2:
            latency.answered(1, number - 2, now + 0.006)
            latency.answered(1, number - 2, now + 0.012)  # further draft tokens of the same answer
    assert latency.seconds == pytest.approx(0.046)
    latency.answered(1, 3, 9.0)
    latency.answered(2, 7, 9.0)
    assert latency.count == 6, "overtaken, or of another session"


def test_answers_that_steps_wait_for_are_faster_on_the_targets_cores():
    latency = AnswerLatency()
    for number in range(20):
        latency.asked(1, number, 0.0, held=number < 4)
        latency.answered(1, number, 0.005 if number < 4 else 0.030)
    assert latency.seconds == pytest.approx(0.030, rel=0.05)
    assert latency.held_seconds == pytest.approx(0.005)
    for number in range(20, 60):  # the draft has moved nearer
        latency.asked(1, number, 0.0, held=False)
        latency.answered(1, number, 0.002)
    assert latency.held_seconds == pytest.approx(0.002, rel=0.05)


def test_first_answers_are_no_measurement():
    """A drafter reads the prompt for them; a session that has ended leaves nothing behind."""
    clock = Clock()
    wait = DraftWait(clock)
    wait.received(1, fresh=True, length=5)
    wait.asked({1: 6, 2: 9})
    clock.now += 0.5
    wait.received(2, fresh=True, length=9)
    assert wait.latency.count == 0
    wait.received(1, fresh=True, length=6)
    assert (wait.latency.count, wait.latency.seconds) == (1, pytest.approx(0.5))
    wait.asked({1: 7, 2: 10})
    wait.closed(1)
    wait.closed(2)
    for session_id, length in ((1, 7), (2, 10)):
        wait.latency.answered(session_id, length, clock.now)
    assert wait.latency.count == 1
