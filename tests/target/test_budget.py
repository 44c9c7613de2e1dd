"""Calibration and break-even: worked by hand, and what they do to an engine whose hints are useless."""

import math

import numpy as np
import pytest

from outrider.speculation.tree import TreeSlice
from services.target.budget import Calibration, break_even, least_score, promised, row_share


def draft(*probabilities):
    n = len(probabilities)
    zeros = np.zeros(n, np.int32)
    return TreeSlice(np.zeros(n, np.uint32), zeros - 1, zeros + 1, np.log(np.array(probabilities, np.float32)))


def test_cost_of_a_row():
    assert row_share(0.020, 0.027, 7) == pytest.approx(0.05)
    assert row_share(0.020, 0.019, 7) == 0.0
    assert row_share(0.020, 1.0, 7) == 1.0


def test_break_even_is_that_of_calibrated_probabilities():
    assert least_score(0.05, 1, 1.0) == pytest.approx(math.log(0.05))
    assert least_score(0.05, 1, 0.1) == pytest.approx(math.log(0.5))
    assert least_score(0.0, 1, 0.1) == -math.inf


def test_a_row_must_pay_for_all_sessions_that_it_holds_up():
    # Eight sessions bring 8 tokens in 1 + 7 * 0.1 = 1.7 steps; a row of 0.1 steps is worth 8 / 1.7 * 0.1 tokens.
    assert break_even(0.1, 8) == pytest.approx(0.8 / 1.7)
    assert break_even(1.0, 8) == 1.0
    rates = [(8 + p) / (1.7 + 0.1) - 8 / 1.7 for p in (break_even(0.1, 8) - 0.01, break_even(0.1, 8) + 0.01)]
    assert rates[0] < 0 < rates[1]


def test_calibration_finds_what_scores_are_worth():
    for worth in (0.1, 0.5, 1.0):
        rng = np.random.default_rng(1)
        calibration = Calibration()
        for _ in range(300):
            calibration.observe(
                promised(draft(0.8, 0.4)), int(rng.random() < 0.8 * worth) + int(rng.random() < 0.4 * worth)
            )
        assert calibration.ratio == pytest.approx(worth, abs=0.2)


def test_what_was_given_up_is_tried_again():
    calibration = Calibration()
    for _ in range(50):
        calibration.observe(promised(draft(0.9, 0.9, 0.9)), 0)
    assert calibration.ratio < 0.05
    steps = 0
    while least_score(0.05, 1, calibration.ratio) >= math.log(0.5):
        calibration.observe(promised(draft()), 0)
        steps += 1
    assert 5 < steps < 200


def test_new_sessions_begin_where_the_others_are():
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(promised(draft(0.5)), 0)
    assert Calibration(calibration.ratio).ratio == pytest.approx(calibration.ratio)
