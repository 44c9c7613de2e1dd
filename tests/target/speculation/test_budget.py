"""Cost, calibration and choice: worked by hand, against trying everything, and on an engine whose hints are useless."""

import itertools
import math

import numpy as np
import pytest

from outrider.speculation.tree import TreeSlice
from services.target.speculation.budget import Budget, min_score, promised
from services.target.speculation.estimates.calibration import Calibration
from services.target.speculation.estimates.step_cost import StepCost
from tests.support.target.driving import chain, engine_of, load_model, opening, run
from tests.support.tiny import write_model

# Free up to 4 rows, then a tenth of a plain step each.
BENT = StepCost({1: 0.010, 4: 0.010, 14: 0.020})


def draft(*probabilities):
    """A chain whose nodes' path probabilities are these."""
    n = len(probabilities)
    numbers = np.arange(n, dtype=np.int32)
    return TreeSlice(np.zeros(n, np.uint32), numbers - 1, numbers + 1, np.log(np.array(probabilities, np.float32)))


def test_cost_between_and_beyond_what_was_measured():
    assert BENT.seconds(np.array([1, 3, 4, 9, 14, 24])) == pytest.approx([0.010, 0.010, 0.010, 0.015, 0.020, 0.030])
    assert StepCost({1: 0.01}, 1e-6).seconds(np.array([1, 50]), kv_tokens=1000) == pytest.approx([0.011, 0.011])
    disturbed = StepCost({1: 0.010, 2: 0.050, 4: 0.012})
    assert disturbed.seconds(np.array([1, 2, 4])) == pytest.approx([0.010, 0.012, 0.012])
    assert "1: 10.0, 4: 10.0, 14: 20.0" in BENT.describe()


def test_trees_are_dear_where_arithmetic_is():
    assert not Budget().trees_are_expensive  # nothing is measured yet
    assert not Budget(BENT).trees_are_expensive
    assert Budget(StepCost({1: 0.004, 8: 0.006, 16: 0.012})).trees_are_expensive


def test_steps_correct_what_was_measured_on_a_busy_machine():
    true = StepCost({1: 0.007, 8: 0.008, 16: 0.010, 32: 0.016, 64: 0.028})
    cost = StepCost(dict.fromkeys((1, 8, 16, 32, 64), 0.024))  # others were starting: all alike, and far too long
    rng = np.random.default_rng(0)
    for _ in range(400):
        rows = int(rng.choice([1, 3, 8, 12, 16, 20, 40, 64]))
        seconds = float(true.seconds(np.array([rows]))[0]) * rng.uniform(0.9, 1.1)
        cost.observe(rows, 0, 10 * seconds if rng.random() < 0.02 else seconds)
    counts = np.array([1, 8, 12, 16, 32, 64, 80])
    assert cost.seconds(counts) == pytest.approx(true.seconds(counts), rel=0.25)
    cost.observe(128, 0, 5.0)  # a prompt chunk
    assert cost.seconds(np.array([1]))[0] == pytest.approx(0.007, rel=0.25)


def test_points_that_no_step_comes_near_are_corrected_as_the_others_are():
    cost = StepCost({1: 0.020, 8: 0.022, 64: 0.080})
    for _ in range(200):
        cost.observe(1, 0, 0.005)
    assert cost.seconds(np.array([1, 8, 64])) == pytest.approx([0.005, 0.0055, 0.020], rel=0.05)


def test_what_is_free_is_taken_and_what_is_not_must_pay():
    budget = Budget(BENT)
    assert budget.select([draft(0.01, 0.001, 0.0001)], [1.0], tokens=1).counts == [3]  # four rows cost as much as one
    # The fifth row costs a tenth of a step in which 2.05 tokens are expected.
    assert budget.select([draft(0.5, 0.3, 0.25, 0.2)], [1.0], tokens=1).counts == [3]
    assert budget.select([draft(0.5, 0.3, 0.25, 0.21)], [1.0], tokens=1).counts == [4]
    # Beside a prompt chunk every row costs; one session's hint must be worth it to all eight.
    assert budget.select([draft(0.9)], [1.0], tokens=64).counts == [1]
    assert budget.select([draft(0.05), *[draft()] * 7], [1.0] * 8, tokens=8).counts == [0] * 8
    assert budget.select([draft(0.95), *[draft()] * 7], [1.0] * 8, tokens=8).counts == [1] + [0] * 7


def test_beside_prompts_a_node_must_bring_what_its_time_would_bring_without_them():
    cost = StepCost({1: 0.010, 8: 0.010, 16: 0.018, 24: 0.026})  # a row more takes a millisecond, a plain step ten
    budget = Budget(cost)
    drafts = [draft(0.9, 0.5, 0.3) for _ in range(8)]
    assert sum(budget.select(drafts, [1.0] * 8, tokens=8).counts) == 8  # 0.9 for a millisecond, where a step brings 0.8
    for rows in (16, 72, 520):
        assert sum(budget.select(drafts, [1.0] * 8, tokens=rows).counts) == 8
        assert budget.min_probability(rows, 8) == pytest.approx(0.8)
    assert sum(budget.select([draft(0.7)] * 8, [1.0] * 8, tokens=520).counts) == 0
    assert cost.prefill(520, 8) == pytest.approx(0.512)
    assert cost.prefill(8, 8) == 0.0


def test_what_a_step_waits_for_pays_for_more_nodes():
    """Held for as long as it computes, a step is half as much longer for a row more."""
    budget = Budget(BENT)
    assert budget.select([draft(0.5, 0.3, 0.25, 0.11)], [1.0], tokens=1).counts == [3]
    least = budget.min_probability(4, 1)
    for _ in range(50):
        budget.waited(BENT.seconds(np.array([4]))[0])
        budget.waited(60.0)  # nobody asked for anything
    assert budget.select([draft(0.5, 0.3, 0.25, 0.11)], [1.0], tokens=1).counts == [4]
    assert budget.select([draft(0.5, 0.3, 0.25, 0.09)], [1.0], tokens=1).counts == [3]
    assert budget.min_probability(4, 1) == pytest.approx(least / 2, rel=1e-3)


def test_calibration_ranks_sessions():
    budget = Budget(StepCost({2: 0.018, 3: 0.020, 4: 0.036}))
    assert budget.select([draft(0.9), draft(0.8)], [0.5, 1.0], tokens=2).counts == [0, 1]


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    cost = StepCost({int(n): float(s) for n, s in zip([1, 3, 6, 9, 14], np.cumsum(rng.random(5)), strict=True)})
    drafts = [draft(*np.cumprod(rng.random(int(rng.integers(0, 5))))) for _ in range(3)]
    ratios = rng.uniform(0.2, 1.0, 3).tolist()
    keys, rows, held = int(rng.integers(0, 100)), int(rng.integers(3, 6)), float(rng.integers(0, 3))
    budget = Budget(cost)
    budget.held = held

    def rate(counts):
        gain = sum(
            ratio * float(np.exp(d.path_scores[:count]).sum())
            for d, ratio, count in zip(drafts, ratios, counts, strict=True)
        )
        seconds = cost.seconds(np.array([rows + sum(counts)]), keys)[0] - cost.prefill(rows, len(drafts))
        return (len(drafts) + gain) / (held + seconds)

    chosen = budget.select(drafts, ratios, rows, keys).counts
    best = max(map(rate, itertools.product(*(range(len(d) + 1) for d in drafts))))
    assert rate(chosen) == pytest.approx(best, rel=1e-6)
    least = budget.min_probability(rows, 3, keys)
    hopeless = [draft(*(0.99 * min(least, 1.0) * np.ones(len(d)))) for d in drafts]
    assert sum(budget.select(hopeless, [1.0] * 3, rows, keys).counts) == 0 or least <= 0.0


def test_least_score_is_that_of_calibrated_probabilities():
    assert min_score(0.05, 1.0) == pytest.approx(math.log(0.05))
    assert min_score(0.05, 0.1) == pytest.approx(math.log(0.5))
    assert min_score(0.0, 0.1) == -math.inf


def test_calibration_finds_what_scores_are_worth():
    for worth in (0.1, 0.5, 1.0):
        rng = np.random.default_rng(1)
        calibration = Calibration()
        for _ in range(300):
            calibration.observe(
                promised(draft(0.8, 0.4)), int(rng.random() < 0.8 * worth) + int(rng.random() < 0.4 * worth)
            )
        assert calibration.ratio == pytest.approx(worth, abs=0.2)


def test_what_was_given_up_is_tried_again_but_ever_more_seldom():
    calibration = Calibration()
    for _ in range(50):
        calibration.observe(promised(draft(0.9, 0.9, 0.9)), 0)
    assert calibration.ratio < 0.05
    tries = []
    for step in range(1000):
        if calibration.due:
            tries.append(step)
        calibration.observe(0.9 if calibration.due else 0.0, 0)
    assert 5 < len(tries) < 15
    calibration.observe(0.9, 1)  # one success, and it is asked again soon
    before = calibration.ratio
    for _ in range(64):
        assert not calibration.due
        calibration.observe(0.0, 0)
    assert calibration.due
    calibration.observe(0.9, 1)
    assert calibration.ratio > 2 * before


def test_new_sessions_begin_where_the_others_are():
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(promised(draft(0.5)), 0)
    heirs = [calibration.heir(session_id) for session_id in range(1000, 1128)]
    assert all(heir.ratio == pytest.approx(calibration.ratio) for heir in heirs)
    for _ in range(3):  # few of them are tried in one step
        assert sum(heir.due for heir in heirs) < 5
        for heir in heirs:
            heir.observe(0.0, 0)


def test_an_engine_gives_up_useless_hints_where_rows_cost(tmp_path):
    model = load_model(write_model(tmp_path))
    engine = engine_of(model)
    engine.speculation.planner.budget = Budget(StepCost({1: 0.010, 64: 0.640}))
    prompts = {i: [7 + i, 8, 9] for i in range(4)}
    expected = run(engine_of(model), [opening(i, prompt, max_tokens=120) for i, prompt in prompts.items()]).new
    verified = []

    def hints(session_id, path):
        done = len(path) - len(prompts[session_id])
        right = expected[session_id][done]
        return [chain(session_id, path, [(right + 1) % 300, 5, 6], score=-0.01)]

    engine = engine_of(model)
    engine.speculation.planner.budget = Budget(StepCost({1: 0.010, 64: 0.640}))
    for i, prompt in prompts.items():
        engine.open(opening(i, prompt, max_tokens=120))
    paths = {i: list(prompt) for i, prompt in prompts.items()}
    while not engine.idle:
        for i, path in paths.items():
            if len(path) < 123:
                engine.receive(hints(i, path), ())
        output = engine.step()
        verified.append(sum(commit.verified for commit in output.commits))
        for commit in output.commits:
            paths[commit.session_id] += commit.tokens.tolist()
    assert {i: path[3:] for i, path in paths.items()} == expected
    assert sum(verified[:5]) > 0, "they are tried"
    assert sum(verified[20:]) < 0.1 * 3 * 4 * len(verified[20:]), "and then given up"
