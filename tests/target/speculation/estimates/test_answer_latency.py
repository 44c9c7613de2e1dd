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


def test_each_session_has_the_latency_of_its_own_link():
    latency = AnswerLatency()
    assert latency.links == [latency]
    for number in range(20):
        for session_id, seconds in ((1, 0.002), (2, 0.022)):
            latency.asked(session_id, number, 0.0, held=True)
            latency.answered(session_id, number, seconds)
    assert latency.of(1).held_seconds == pytest.approx(0.002)
    assert latency.of(2).held_seconds == pytest.approx(0.022)
    assert 0.002 < latency.seconds < 0.022
    assert latency.of(3).seconds == latency.seconds, "unknown until its first answer"
    assert len(latency.links) == 2
    latency.closed(2)
    assert latency.of(2) is latency
    assert len(latency.links) == 1


def test_answers_count_as_useful_apart_where_draft_tokens_were_left():
    latency = AnswerLatency()
    assert latency.useful(bare=True) == 1.0
    for number in range(40):
        latency.asked(1, number, 0.0, held=False, bare=number % 2 == 0)
        latency.answered(1, number, 0.004, useful=number % 2 == 0)
    assert latency.of(1).useful(bare=True) == pytest.approx(1.0)
    assert latency.of(1).useful(bare=False) == pytest.approx(0.0, abs=0.01)


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


def test_commits_whose_answers_would_be_no_measurement_are_forgotten():
    latency = AnswerLatency()
    for number in range(1000):
        latency.asked(1, number, 0.01 * number, held=False)
    latency.answered(1, 100, 10.0, useful=False)
    assert (latency.count, latency.useful(bare=True)) == (0, 1.0)
    latency.answered(1, 990, 10.0, useful=False)
    assert (latency.count, latency.useful(bare=True)) == (1, 0.0)
