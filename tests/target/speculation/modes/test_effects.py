"""Throughput of modes beside one another, while the text under them changes."""

import math
import random

import pytest

from services.target.speculation.modes.effects import ModeEffects

NOISE = 0.2**2
WALK = 0.1**2


def measured(gain, trials, seed=1):
    """Two modes in turns, of which the second one has a gain. Texts differ several times as much."""
    effects, draw, level = ModeEffects("ab"), random.Random(seed), 4.0
    for number in range(trials):
        level += 0.1 * draw.gauss(0.0, 1.0)
        mode = "ab"[number % 2]
        rate = math.exp(level + gain * (mode == "b") + 0.2 * draw.gauss(0.0, 1.0))
        effects.observe(mode, rate, NOISE, WALK, seconds=0.5)
    return effects


@pytest.mark.parametrize("gain", [-0.2, 0.0, 0.2])
def test_a_difference_is_found_under_texts_that_differ_more(gain):
    found = [math.log(one.rate("b") / one.rate("a")) for one in (measured(gain, 80, seed) for seed in range(20))]
    assert sum(found) / len(found) == pytest.approx(gain, abs=0.04)
    deviation = measured(gain, 80).deviation("a", "b")
    spread = math.sqrt(sum((one - gain) ** 2 for one in found) / len(found))
    assert 0.6 < spread / deviation < 1.5, "the deviation is what it says"


def test_more_trials_make_surer():
    assert measured(0.2, 4).deviation("a", "b") > 1.5 * measured(0.2, 40).deviation("a", "b")


def test_short_trials_count_for_less():
    effects = ModeEffects("ab")
    effects.observe("a", 100.0, 1e-4, 0.0, 0.0)
    effects.observe("b", 50.0, 1.0, 0.0, 0.0)
    assert 70.0 < effects.rate("b") < 100.0
    effects.observe("b", 50.0, 1e-4, 0.0, 0.0)
    assert effects.rate("b") == pytest.approx(50.0, rel=0.01)


def test_one_disturbed_trial_is_half_believed():
    effects = measured(0.0, 60)
    before = effects.rate("a")
    effects.observe("b", before / 20, NOISE, WALK, 0.5)
    assert before / 20 < effects.rate("b") < before / 2
    assert effects.deviation("a", "b") > 0.5, "so that it is tried again"
    for _ in range(3):
        effects.observe("b", before, NOISE, WALK, 0.5)
    assert effects.rate("b") == pytest.approx(effects.rate("a"), rel=0.3)


def test_a_relation_says_nothing_new_where_more_is_known():
    effects = ModeEffects("ab")
    effects.observe("a", 100.0, NOISE, 0.0, 0.0)
    effects.relate("b", "a", 1.2, 0.1)
    assert effects.rate("b") == pytest.approx(120.0, rel=0.02)
    assert effects.deviation("a", "b") < 0.1
    for _ in range(50):
        effects.relate("b", "a", 3.0, 0.1)
    assert effects.rate("b") == pytest.approx(120.0, rel=0.02)


def test_trials_are_scaled_when_more_is_known_of_them():
    effects = ModeEffects("ab")
    effects.observe("a", 100.0, NOISE, 0.0, 0.0)
    before = effects.rate("b")
    effects.scale("a", 1.5)
    assert effects.rate("a") == pytest.approx(150.0, rel=1e-3)
    assert effects.rate("b") == pytest.approx(before)
