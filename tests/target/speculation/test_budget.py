"""Verification budget, cost model and calibration: by hand, against exhaustive search, and on an engine."""

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

# Tokens are free up to 4, then cost a tenth of a plain step each.
BENT_COST = StepCost({1: 0.010, 4: 0.010, 14: 0.020})


def draft(*probabilities):
    """A draft chain with these path probabilities."""
    n = len(probabilities)
    numbers = np.arange(n, dtype=np.int32)
    return TreeSlice(np.zeros(n, np.uint32), numbers - 1, numbers + 1, np.log(np.array(probabilities, np.float32)))


def test_cost_is_interpolated_and_extrapolated():
    assert BENT_COST.seconds(np.array([1, 3, 4, 9, 14, 24])) == pytest.approx(
        [0.010, 0.010, 0.010, 0.015, 0.020, 0.030]
    )
    assert StepCost({1: 0.01}, 1e-6).seconds(np.array([1, 50]), kv_tokens=1000) == pytest.approx([0.011, 0.011])
    disturbed = StepCost({1: 0.010, 2: 0.050, 4: 0.012})
    assert disturbed.seconds(np.array([1, 2, 4])) == pytest.approx([0.010, 0.012, 0.012])
    assert "1: 10.0, 4: 10.0, 14: 20.0" in BENT_COST.describe()


def test_trees_are_expensive_where_tokens_are():
    assert not Budget().trees_are_expensive  # nothing is measured yet
    assert not Budget(BENT_COST).trees_are_expensive
    assert Budget(StepCost({1: 0.004, 8: 0.006, 16: 0.012})).trees_are_expensive


def test_steps_correct_costs_measured_on_a_busy_machine():
    true = StepCost({1: 0.007, 8: 0.008, 16: 0.010, 32: 0.016, 64: 0.028})
    cost = StepCost(
        dict.fromkeys((1, 8, 16, 32, 64), 0.024)
    )  # measured while other processes started: all points alike and far too long
    rng = np.random.default_rng(0)
    for _ in range(400):
        tokens = int(rng.choice([1, 3, 8, 12, 16, 20, 40, 64]))
        seconds = float(true.seconds(np.array([tokens]))[0]) * rng.uniform(0.9, 1.1)
        cost.observe(tokens, 0, 10 * seconds if rng.random() < 0.02 else seconds)
    counts = np.array([1, 8, 12, 16, 32, 64, 80])
    assert cost.seconds(counts) == pytest.approx(true.seconds(counts), rel=0.25)
    cost.observe(128, 0, 5.0)  # a prompt chunk
    assert cost.seconds(np.array([1]))[0] == pytest.approx(0.007, rel=0.25)


def test_points_without_steps_are_corrected_like_the_others():
    cost = StepCost({1: 0.020, 8: 0.022, 64: 0.080})
    for _ in range(200):
        cost.observe(1, 0, 0.005)
    assert cost.seconds(np.array([1, 8, 64])) == pytest.approx([0.005, 0.0055, 0.020], rel=0.05)


def test_free_tokens_are_selected_and_others_must_pay():
    budget = Budget(BENT_COST)
    assert budget.select([draft(0.01, 0.001, 0.0001)], [1.0], tokens=1).counts == [3]  # four tokens cost as much as one
    # The fifth token costs a tenth of a step in which 2.05 tokens are expected.
    assert budget.select([draft(0.5, 0.3, 0.25, 0.2)], [1.0], tokens=1).counts == [3]
    assert budget.select([draft(0.5, 0.3, 0.25, 0.21)], [1.0], tokens=1).counts == [4]
    # Beside a prompt chunk each token costs; one session's draft token must pay for the delay of all eight.
    assert budget.select([draft(0.9)], [1.0], tokens=64).counts == [1]
    assert budget.select([draft(0.05), *[draft()] * 7], [1.0] * 8, tokens=8).counts == [0] * 8
    assert budget.select([draft(0.95), *[draft()] * 7], [1.0] * 8, tokens=8).counts == [1] + [0] * 7


def test_prompts_do_not_make_draft_tokens_cheaper():
    cost = StepCost({1: 0.010, 8: 0.010, 16: 0.018, 24: 0.026})  # one more token takes 1 ms, a plain step 10 ms
    budget = Budget(cost)
    drafts = [draft(0.9, 0.5, 0.3) for _ in range(8)]
    assert sum(budget.select(drafts, [1.0] * 8, tokens=8).counts) == 8  # 0.9 tokens/ms, where a plain step has 0.8
    for tokens in (16, 72, 520):
        assert sum(budget.select(drafts, [1.0] * 8, tokens=tokens).counts) == 8
        assert budget.min_probability(tokens, 8) == pytest.approx(0.8)
    assert sum(budget.select([draft(0.7)] * 8, [1.0] * 8, tokens=520).counts) == 0
    assert cost.prefill(520, 8) == pytest.approx(0.512)
    assert cost.prefill(8, 8) == 0.0


def test_waiting_steps_verify_more_draft_tokens():
    """A step that is held for as long as it computes becomes half as much longer by one more token."""
    budget = Budget(BENT_COST)
    assert budget.select([draft(0.5, 0.3, 0.25, 0.11)], [1.0], tokens=1).counts == [3]
    least = budget.min_probability(4, 1)
    for _ in range(50):
        budget.waited(BENT_COST.seconds(np.array([4]))[0])
        budget.waited(60.0)  # an idle engine is no wait
    assert budget.select([draft(0.5, 0.3, 0.25, 0.11)], [1.0], tokens=1).counts == [4]
    assert budget.select([draft(0.5, 0.3, 0.25, 0.09)], [1.0], tokens=1).counts == [3]
    assert budget.min_probability(4, 1) == pytest.approx(least / 2, rel=1e-3)


def test_calibration_ranks_sessions():
    budget = Budget(StepCost({2: 0.018, 3: 0.020, 4: 0.036}))
    assert budget.select([draft(0.9), draft(0.8)], [0.5, 1.0], tokens=2).counts == [0, 1]


@pytest.mark.parametrize("seed", range(30))
def test_the_selection_is_optimal(seed):
    rng = np.random.default_rng(seed)
    cost = StepCost({int(n): float(s) for n, s in zip([1, 3, 6, 9, 14], np.cumsum(rng.random(5)), strict=True)})
    drafts = [draft(*np.cumprod(rng.random(int(rng.integers(0, 5))))) for _ in range(3)]
    ratios = rng.uniform(0.2, 1.0, 3).tolist()
    kv_tokens, tokens, held = int(rng.integers(0, 100)), int(rng.integers(3, 6)), float(rng.integers(0, 3))
    budget = Budget(cost)
    budget.held = held

    def rate(counts):
        gain = sum(
            ratio * float(np.exp(d.path_scores[:count]).sum())
            for d, ratio, count in zip(drafts, ratios, counts, strict=True)
        )
        seconds = cost.seconds(np.array([tokens + sum(counts)]), kv_tokens)[0] - cost.prefill(tokens, len(drafts))
        return (len(drafts) + gain) / (held + seconds)

    chosen = budget.select(drafts, ratios, tokens, kv_tokens).counts
    best = max(map(rate, itertools.product(*(range(len(d) + 1) for d in drafts))))
    assert rate(chosen) == pytest.approx(best, rel=1e-6)
    least = budget.min_probability(tokens, 3, kv_tokens)
    hopeless = [draft(*(0.99 * min(least, 1.0) * np.ones(len(d)))) for d in drafts]
    assert sum(budget.select(hopeless, [1.0] * 3, tokens, kv_tokens).counts) == 0 or least <= 0.0


def test_min_score_corresponds_to_calibrated_probabilities():
    assert min_score(0.05, 1.0) == pytest.approx(math.log(0.05))
    assert min_score(0.05, 0.1) == pytest.approx(math.log(0.5))
    assert min_score(0.0, 0.1) == -math.inf


def test_calibration_finds_the_acceptance_ratio():
    for acceptance in (0.1, 0.5, 1.0):
        rng = np.random.default_rng(1)
        calibration = Calibration()
        for _ in range(300):
            calibration.observe(
                promised(draft(0.8, 0.4)), int(rng.random() < 0.8 * acceptance) + int(rng.random() < 0.4 * acceptance)
            )
        assert calibration.ratio == pytest.approx(acceptance, abs=0.2)


def test_rejected_drafters_are_tried_ever_more_seldom():
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
    calibration.observe(0.9, 1)  # after one success it is tried again soon
    before = calibration.ratio
    for _ in range(64):
        assert not calibration.due
        calibration.observe(0.0, 0)
    assert calibration.due
    calibration.observe(0.9, 1)
    assert calibration.ratio > 2 * before


def test_new_sessions_inherit_the_calibration():
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(promised(draft(0.5)), 0)
    inherited = [calibration.for_new_session(session_id) for session_id in range(1000, 1128)]
    assert all(one.ratio == pytest.approx(calibration.ratio) for one in inherited)
    for _ in range(3):  # few of them try in one step
        assert sum(one.due for one in inherited) < 5
        for one in inherited:
            one.observe(0.0, 0)


def test_an_engine_stops_verifying_useless_drafts_where_tokens_cost(tmp_path):
    model = load_model(write_model(tmp_path))
    engine = engine_of(model)
    engine.speculation.planner.budget = Budget(StepCost({1: 0.010, 64: 0.640}))
    prompts = {i: [7 + i, 8, 9] for i in range(4)}
    expected = run(engine_of(model), [opening(i, prompt, max_tokens=120) for i, prompt in prompts.items()]).new
    verified = []

    def proposals(session_id, path):
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
                engine.receive(proposals(i, path), ())
        output = engine.step()
        verified.append(sum(commit.verified for commit in output.commits))
        for commit in output.commits:
            paths[commit.session_id] += commit.tokens.tolist()
    assert {i: path[3:] for i, path in paths.items()} == expected
    assert sum(verified[:5]) > 0, "draft tokens are verified at first"
    assert sum(verified[20:]) < 0.1 * 3 * 4 * len(verified[20:]), "and hardly any later"
