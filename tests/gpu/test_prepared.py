"""Prepared steps on a GPU: the same texts, no wait for the device but the one for samples, and a busy device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.config import TargetConfig
from outrider.serving.features import FeatureSpec
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.model.loading.load import load
from services.target.process.warmup import warm_up
from services.target.speculation.modes.mode import SpeculationMode
from tests.support.target.driving import counting, opening, run
from tests.support.target.features import F32, Reader, configured
from tests.support.target.proposals import Drafts
from tests.support.tiny import write_model

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

FILTERS = [{}, {"top_k": 30}, {"top_p": 0.9}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.backends.cuda.matmul.allow_tf32 = False
    return write_model(tmp_path_factory.mktemp("model"), seed=1)


def engine_of(folder, **flags):
    """An engine that verifies what has arrived. prepared: steps that the device prepared."""
    config = TargetConfig(model_path=str(folder), dtype="float32", max_total_tokens=4096, device="cuda", **flags)
    engine = TargetEngine(load(folder, config), config, [SpeculationMode.DRAFT_IF_READY])
    warm_up(engine)
    return counting(engine, "_launch_prepared", "prepared")


def requests(temperature, **options):
    return [
        opening(i, [5 + i] * (1 + 7 * i), SamplingParams(temperature, seed=i, **FILTERS[i % 3]), **options)
        for i in range(9)
    ]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["right", "mixed", "late"])
def test_texts_are_those_of_steps_in_turn(folder, eager, temperature, kind):
    todo = requests(temperature, max_tokens=40, stop_token_ids=(7, 90, 200, 201, 202, 203))
    plain = engine_of(folder, disable_cuda_graph=eager, disable_overlap_schedule=True)
    assert not plain.launcher.prepares
    expected = run(plain, todo)
    engine = engine_of(folder, disable_cuda_graph=eager, page_size=4)
    assert engine.launcher.prepares
    found = run(engine, todo, Drafts(kind, todo, expected.new))
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert engine.prepared > found.steps / 3
    assert found.accepted > 20


@pytest.mark.parametrize("eager", [True, False])
def test_a_prepared_step_waits_only_for_its_samples(folder, eager):
    """PyTorch raises where an operation waits for the device; waiting for the event behind the samples is none."""
    engine = engine_of(folder, disable_cuda_graph=eager)
    todo = requests(1.0, max_tokens=60)
    drafts = Drafts("mixed", todo, {r.session_id: run(engine, [r]).new[r.session_id] for r in todo})
    paths = {request.session_id: request.tokens.tolist() for request in todo}
    for request in todo:
        engine.open(request)
    try:
        for step in range(20):
            if step == 8:  # by now, everything lazy is done
                torch.cuda.set_sync_debug_mode("error")
            for i, path in paths.items():
                engine.receive(drafts(i, path), ())
            for commit in engine.step().commits:
                paths[commit.session_id] += commit.tokens.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while not engine.idle:
        engine.step()
    assert engine.prepared > 8
    engine.scheduler.allocator.check(expected_leased=0)


def test_hidden_states_are_those_of_steps_in_turn(folder):
    """A session's rows are sent once each and in order, though two steps are in flight."""
    todo = requests(1.0, max_tokens=40)
    texts = run(engine_of(folder, disable_overlap_schedule=True), todo).new
    readers = []
    for flags in ({"disable_overlap_schedule": True}, {}):
        engine = engine_of(folder, **flags)
        wanted = configured(engine, FeatureSpec((0, 1), format=F32))
        reader = Reader(engine)
        for request in todo:
            reader.open(replace(request, feature_spec=wanted))
        readers.append(reader.run(Drafts("mixed", todo, texts)))
    plain, prepared = readers
    assert prepared.engine.prepared > 5
    assert prepared.tokens == plain.tokens
    for request in todo:
        mine, expected = prepared.states(request.session_id), plain.states(request.session_id)
        count = min(len(mine), len(expected))
        assert count > len(request.tokens)
        np.testing.assert_allclose(mine[:count], expected[:count], rtol=2e-3, atol=2e-3)
