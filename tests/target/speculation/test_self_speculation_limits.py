"""Own drafts keep to what a session allows, and nobody's limit is another's."""

from dataclasses import replace

import pytest

from outrider.config import TargetConfig
from outrider.serving.session import UNBOUNDED
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.kernels.cpu import library
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.mode_selector import SpeculationMode
from tests.support.checkpoints.heads import write_pair
from tests.support.target.driving import engine_of, load_model, opening, run

pytestmark = pytest.mark.skipif(not library.available(), reason="own drafts are of compiled programs")

GATHERS = [0.0, 60.0]  # 60 lets rounds follow one another in one call


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    target, folder, _ = write_pair(
        tmp_path_factory.mktemp("pair"), "EAGLE3", eagle_aux_hidden_state_layer_ids=[-1, 0, 1]
    )
    return load_model(target, self_speculation="head", self_speculation_head=str(folder))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    target, _, _ = write_pair(tmp_path_factory.mktemp("pair"), "EAGLE3", eagle_aux_hidden_state_layer_ids=[-1, 0, 1])
    return load_model(target, self_speculation="quantized", self_speculation_format="int4")


def drafting(model, gather=0.0):
    """An engine that drafts in every step, and to which all nodes are as good as free."""
    flags = {"page_size": 16, "max_total_tokens": 4096, "chunked_prefill_size": 512, "coalesce_seconds": gather}
    engine = TargetEngine(model, TargetConfig(**flags), (SpeculationMode.SELF_SPECULATE,))
    engine.speculation.chooser.looks_up = False
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 256: 1.001})
    source = engine.speculation.chooser.source
    engine.speculation.chooser.always = True
    source.pays = lambda *_: True
    if model.copied:
        source._cost = engine.speculation.planner.budget.cost.scaled(0.01)
    return engine


def limited(number, most):
    request = opening(number, [5, 6, 7, number], SamplingParams(1.0, seed=number), max_tokens=60)
    return replace(request, max_draft_tokens=most)


def verified(found, number):
    return max(commit.verified for commit in found.commits[number])


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8])
def test_no_more_nodes_than_a_session_allows(head, most, gather):
    request = limited(1, most)
    found = run(drafting(head, gather), [request])
    assert 1 <= verified(found, 1) <= most
    assert found.new == run(engine_of(head), [request]).new


@pytest.mark.parametrize("kind", ["head", "copy"])
def test_one_that_allows_few_spares_others_nothing(request, kind):
    model = request.getfixturevalue(kind)
    requests = [limited(1, 1), limited(2, 3), limited(3, UNBOUNDED)]
    found = run(drafting(model), requests)
    assert verified(found, 1) == 1
    assert 1 < verified(found, 2) <= 3
    assert verified(found, 3) > 4
    assert found.new == run(engine_of(model), requests).new
