"""Self-speculation respects max_draft_tokens of each session."""

from dataclasses import replace

import pytest

from outrider.serving.session import UNBOUNDED
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.speculation.estimates.step_cost import StepCost
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.target.self_speculation import LONG, drafting, with_head

pytestmark = pytest.mark.skipif(not library.available(), reason="self-speculation needs compiled programs")


@pytest.fixture(scope="module")
def head(pair):
    target, folder, _ = pair
    return with_head(target, folder)


@pytest.fixture(scope="module")
def copy(pair):
    return load_model(pair[0], self_speculation="quantized", self_speculation_format="int4")


def cheaply_drafting(model, window=0.0):
    """An engine that drafts in every step, with nearly free draft tokens. window: coalescing window in seconds."""
    engine = drafting(model, coalesce_seconds=window)
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 256: 1.001})
    if model.copied:
        engine.speculation.chooser.source.cost = engine.speculation.planner.budget.cost.scaled(0.01)
    return engine


def limited(number, most):
    request = opening(number, [5, 6, 7, number], SamplingParams(1.0, seed=number), max_tokens=60)
    return replace(request, max_draft_tokens=most)


def verified(found, number):
    return max(commit.verified for commit in found.commits[number])


@pytest.mark.parametrize("window", [0.0, LONG])  # step by step, and in a fused loop
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8])
def test_verified_tokens_respect_max_draft_tokens(head, most, window):
    request = limited(1, most)
    found = run(cheaply_drafting(head, window), [request])
    assert 1 <= verified(found, 1) <= most
    assert found.new == run(engine_of(head), [request]).new


@pytest.mark.parametrize("kind", ["head", "copy"])
def test_a_low_limit_of_one_session_does_not_limit_others(request, kind):
    model = request.getfixturevalue(kind)
    requests = [limited(1, 1), limited(2, 3), limited(3, UNBOUNDED)]
    found = run(cheaply_drafting(model), requests)
    assert verified(found, 1) == 1
    assert 1 < verified(found, 2) <= 3
    assert verified(found, 3) > 4
    assert found.new == run(engine_of(model), requests).new
