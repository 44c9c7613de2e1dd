"""Steps that overlap on a GPU: the same texts, and no wait for the device but the one for a step's draws."""

import pytest
import torch

from outrider.speculation.sampling import SamplingParams
from services.target.process.warmup import warm_up
from services.target.sampling import sampler
from tests.support.invariance.engines import target_engine
from tests.support.target.driving import chain, counting, opening, run
from tests.support.tiny import write_model

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

FILTERS = [{}, {"top_k": 30}, {"top_p": 0.9}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.backends.cuda.matmul.allow_tf32 = False
    return write_model(tmp_path_factory.mktemp("model"), seed=1)


def engine_of(folder, **flags):
    engine = target_engine(folder, device="cuda", **flags)
    warm_up(engine)
    return engine


def requests(temperature, **options):
    return [
        opening(i, [5 + i] * (1 + 7 * i), SamplingParams(temperature, seed=i, **FILTERS[i % 3]), **options)
        for i in range(9)
    ]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_steps_in_turn(folder, eager, temperature):
    todo = requests(temperature, max_tokens=40, stop_token_ids=(7, 90, 200, 201, 202, 203))
    plain = engine_of(folder, disable_cuda_graph=eager, disable_overlap_schedule=True)
    expected = run(plain, todo)
    engine = counting(engine_of(folder, disable_cuda_graph=eager, page_size=4), "launch_behind", "behind")
    found = run(engine, todo)
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert engine.behind > found.steps / 2


@pytest.mark.parametrize("eager", [True, False])
def test_resampled_rows_invalidate_the_next_step(folder, eager, monkeypatch):
    todo = [opening(i, [5 + i] * 4, SamplingParams(1.5, seed=i, top_p=0.95)) for i in range(5)]
    expected = run(engine_of(folder, disable_cuda_graph=eager, disable_overlap_schedule=True), todo).new
    monkeypatch.setattr(sampler, "_ORDERED", 2)
    engine = counting(engine_of(folder, disable_cuda_graph=eager), "launch_behind", "behind")
    assert run(engine, todo).new == expected
    assert engine.behind > 10


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("eager", [True, False])
def test_a_step_waits_only_for_its_samples(folder, eager, speculative):
    """PyTorch raises where an operation waits for the device; waiting for the event behind the draws is none."""
    engine = engine_of(folder, disable_cuda_graph=eager)
    todo = requests(1.0, max_tokens=40)
    text = {r.session_id: r.tokens.tolist() + run(engine, [r]).new[r.session_id] for r in todo} if speculative else {}
    paths = {request.session_id: request.tokens.tolist() for request in todo}
    for request in todo:
        engine.open(request)
    try:
        for step in range(30):
            if step == 8:  # by now, everything lazy is done
                torch.cuda.set_sync_debug_mode("error")
            if speculative:
                for i, path in paths.items():
                    engine.receive([chain(i, path, text[i][len(path) : len(path) + 2])], ())
            for commit in engine.step().commits:
                paths[commit.session_id] += commit.tokens.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while not engine.idle:
        engine.step()
    engine.scheduler.allocator.check(expected_leased=0)
