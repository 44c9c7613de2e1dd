"""The expected throughput with and without waiting, in limiting cases."""

import pytest

from bench.ahead.theory import ahead, plain_steps, prepared_of, waiting

STEP = 0.02


def test_limiting_cases():
    assert waiting(2.5, STEP, 0.0) == pytest.approx(2.5 / STEP)
    assert ahead(2.5, STEP, 0.003, 1 - 1e-9) == pytest.approx(2.5 / STEP), "every outcome was prepared"
    assert ahead(2.5, STEP, 0.003, 0.0) == pytest.approx((2.5 + 1) / 2 / STEP), "every second step has a tree"
    assert ahead(1.0, STEP, 0.5, 0.0) == pytest.approx(1 / STEP), "a useless drafter"


def test_answers_that_take_longer_than_a_step_must_hold_its_token():
    assert [plain_steps(2.0, STEP, latency) for latency in (0.0, 0.019, 0.021, 0.05)] == [1, 1, 1 + 2, 2 + 4]


@pytest.mark.parametrize("prepared", [0.0, 0.2, 0.7])
@pytest.mark.parametrize("latency", [0.003, 0.03])
def test_what_was_prepared_follows_from_the_share_in_time(prepared, latency):
    run, plain = 1 / (1 - prepared), plain_steps(2.5, STEP, latency)
    assert prepared_of(run / (run + plain), 2.5, STEP, latency) == pytest.approx(prepared)


def test_waiting_wins_at_short_distances_and_loses_at_long_ones():
    near, far = 0.004, 0.02
    assert waiting(2.5, STEP, near) > ahead(2.5, STEP, near, 0.2)
    assert waiting(2.5, STEP, far) < ahead(2.5, STEP, far, 0.2)
    assert waiting(2.5, STEP, near) < ahead(2.5, STEP, near, 0.8)
