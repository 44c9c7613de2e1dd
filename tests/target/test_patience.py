"""Patience on a clock that the test winds: it waits where that pays, and goes at once where it does not."""

import pytest

from services.target.patience import TURN, Patience


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def work(clock, patience, steps, *, answer, gain, step=0.030):
    """Steps of one session whose hints take `answer` seconds and, if awaited, bring `gain` tokens. Returns waits."""
    waits = []
    for _ in range(steps):
        waited = min(patience.remaining, answer)
        fresh = waited == answer and patience.remaining > 0
        clock.now += waited
        patience.answered(1, fresh)
        waits.append(waited)
        patience.begin()
        clock.now += step
        patience.end([1], 1, 1 + gain if fresh else 1)
    return waits


@pytest.mark.parametrize(("answer", "gain", "pays"), [(0.001, 1, True), (0.005, 0, False), (0.025, 3, False)])
def test_it_waits_where_that_pays(answer, gain, pays):
    clock = Clock()
    patience = Patience(clock)
    work(clock, patience, 4 * TURN, answer=answer, gain=gain)
    waits = work(clock, patience, 32 * TURN, answer=answer, gain=gain)
    share = sum(wait > 0 for wait in waits) / len(waits)
    assert share > 0.8 if pays else share < 0.2
    assert max(waits) <= 0.2 * 0.04


def test_it_changes_its_mind():
    clock = Clock()
    patience = Patience(clock)
    work(clock, patience, 64 * TURN, answer=0.004, gain=0)
    waits = work(clock, patience, 96 * TURN, answer=0.001, gain=2)[-16 * TURN :]
    assert sum(wait > 0 for wait in waits) > 0.8 * len(waits)


def test_without_drafter_or_sessions_nothing_is_awaited():
    clock = Clock()
    patience = Patience(clock)
    for _ in range(3 * TURN):
        clock.now += 0.03
        patience.begin()
        patience.end([1, 2], 2, 2)
        assert patience.remaining == 0.0
    patience.answered(1, fresh=True)
    clock.now += 0.03
    patience.end([1, 2], 2, 2)
    assert patience.remaining > 0.0
    patience.forget(1)
    assert patience.remaining == 0.0
