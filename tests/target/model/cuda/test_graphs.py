"""Padding to captured sizes, and what is replayed, at every size: on the CPU, where a capture is a plain call."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.paging.allocator import NULL_PAGE
from outrider.placement.step_sizes import captured_rows
from services.target.kernels.grouped import GroupedAttention
from services.target.model.cuda import graphs
from services.target.model.cuda.graphs import GraphRunner, direct
from services.target.model.modules import ModuleRunner
from services.target.step.batch import Capture, build, pad
from services.target.step.layout import Extent
from tests.support.target.cuda.graphs import CPU, SIZES, history, modules
from tests.support.target.cuda.interpreter import need_interpreter
from tests.support.target.driving import engine_of, load_model, opening, random_tree, run
from tests.support.target.works import decoding
from tests.support.tiny import VOCAB, write_model


@pytest.fixture(scope="module")
def inner(tmp_path_factory):
    return modules(write_model(tmp_path_factory.mktemp("model"), sliding_window=9, family="mistral"))


@torch.inference_mode()
def outcome(runner, batch, cache):
    outputs = runner.forward(batch, cache)
    return outputs.logits.clone(), outputs.features, [pool[1:].clone() for pool in (*cache.keys, *cache.values)]


@pytest.mark.parametrize("rows", sorted({size + d for size in SIZES for d in (-1, 0, 1)} - {0}))
def test_padding_changes_no_logits_and_no_pages(inner, rows):
    works = decoding(rows)
    batch = build(works, CPU)
    expected, _, pools = outcome(inner, batch, history(works))
    cache = history(works)
    runner = GraphRunner(inner, SIZES, direct)
    runner.capture(cache, CPU)
    untouched = history(works)
    for mine, other in zip((*cache.keys, *cache.values), (*untouched.keys, *untouched.values), strict=True):
        assert torch.equal(mine[1:], other[1:])
    found, _, found_pools = outcome(runner, batch, cache)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for mine, other in zip(found_pools, pools, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_padding_appends_rows_without_a_session():
    batch = build(decoding(5), CPU)
    padded = pad(batch, 16)
    assert len(padded) == 16
    assert padded.spans[-1].is_padding
    assert not any(span.is_padding for span in batch.spans)
    assert (padded.layout.slots[5:] // 4 == NULL_PAGE).all()
    assert (padded.rows.sampled[: len(batch.rows.sampled)] == batch.rows.sampled).all()
    assert not padded.rows.sampled[len(batch.rows.sampled) :].any()
    assert pad(batch, 5).layout is batch.layout


def test_sizes_that_serve():
    runner = GraphRunner(ModuleRunner(torch.nn.Module(), GroupedAttention), [4, 1, 8], direct)
    assert [runner.size_for(rows) for rows in range(1, 10)] == [1, 4, 4, 4, 8, 8, 8, 8, None]
    exact = GraphRunner(ModuleRunner(torch.nn.Module(), GroupedAttention), [4, 1, 8], direct, padding=False)
    assert [exact.size_for(rows) for rows in range(1, 10)] == [1, None, None, 4, None, None, None, 8, None]


def test_another_cache_is_not_captured(inner):
    works = decoding(4)
    runner = GraphRunner(inner, SIZES, direct)
    runner.capture(history(works), CPU)
    batch, other = build(works, CPU), history(works)
    expected = outcome(inner, batch, history(works))
    found = outcome(runner, batch, other)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(mine, its) for mine, its in zip(found[2], expected[2], strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_steps_may_have_more_rows_than_the_cache_has_room_for(tmp_path, page_size):
    need_interpreter()
    plain = load_model(write_model(tmp_path, num_hidden_layers=1))
    requests, flags = [opening(1, [5, 6, 7], max_tokens=4)], {"page_size": page_size, "max_total_tokens": 16}
    expected = run(engine_of(plain, **flags), requests).new
    runner = GraphRunner(modules(tmp_path, "triton"), [1, 48], direct)
    engine = engine_of(replace(plain, runner=runner), **flags)
    runner.capture(engine.cache, CPU)
    assert run(engine, requests).new == expected


@pytest.mark.parametrize("rows", [[5, 0, 3], [2, 3, 4]])
def test_hidden_states_come_from_captured_steps_too(inner, rows):
    """From others until these are captured. They last, because they may be fused later."""
    works = decoding(6)
    capture = Capture((0, 1), True, np.array(rows))
    batch = replace(build(works, CPU), capture=capture)
    expected = outcome(inner, batch, history(works))[1]
    cache = history(works)
    runner = GraphRunner(inner, SIZES, direct)
    runner.capture(cache, CPU)
    torch.testing.assert_close(outcome(runner, batch, cache)[1], expected, atol=1e-5, rtol=1e-4)
    runner.expect(capture)
    assert runner.due == len(SIZES)
    while runner.due:
        runner.capture_next()
    found = outcome(runner, batch, cache)[1]
    assert {key.size for key in runner.steps if key.final} == set(SIZES)
    outcome(runner, replace(build(decoding(4), CPU), capture=replace(capture, rows=np.array([0]))), cache)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_steps_that_cannot_be_captured_run_directly(inner, caplog):
    def refuse(_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    works = decoding(3)
    cache = history(works)
    runner = GraphRunner(inner, SIZES, refuse)
    runner.capture(cache, CPU)
    assert "not permitted when stream is capturing" in caplog.text
    expected = outcome(inner, build(works, CPU), history(works))[0]
    assert torch.equal(outcome(runner, build(works, CPU), cache)[0], expected)


@pytest.mark.parametrize(("backend", "ordered"), [("torch_native", False), ("triton", False), ("triton", True)])
def test_captured_steps_give_the_same_text(tmp_path, backend, ordered):
    if backend == "triton":
        need_interpreter()
    plain = load_model(write_model(tmp_path, num_hidden_layers=1))
    requests = [opening(i, [5 + i, 6, 7, 5 + i, 6], max_tokens=5) for i in range(3)]

    def proposals():
        rng = np.random.default_rng(1)
        return lambda session_id, path: [random_tree(rng, session_id, path, VOCAB, 5)]

    expected = run(engine_of(plain), requests, proposals()).new
    runner = GraphRunner(modules(tmp_path, backend, ordered=ordered), [1, 4, 12], direct)
    engine = engine_of(replace(plain, runner=runner), speculative_num_draft_tokens=4)
    runner.capture(engine.cache, CPU)
    assert run(engine, requests, proposals()).new == expected
    plain, short, long = Extent
    fitted = backend == "triton" and not ordered
    assert {(key.size, key.extent) for key in runner.steps} == (
        {(1, plain), (4, plain), (4, short), (12, plain), (12, short), (12, long)}
        if fitted
        else {(1, long), (4, long), (12, long)}
    )


def test_sizes_follow_the_flags():
    assert captured_rows(TargetConfig(max_running_requests=20)) == [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64]
    assert captured_rows(TargetConfig(cuda_graph_bs=(3, 1))) == [1, 3]
    assert captured_rows(TargetConfig(cuda_graph_bs=(1, 2), speculative_num_draft_tokens=4)) == [1, 2, 4, 8]
    fixed = TargetConfig(cuda_graph_max_bs=4, speculative_num_draft_tokens=16)
    assert captured_rows(fixed) == [1, 2, 4, 16, 32, 64]
    assert captured_rows(TargetConfig(cuda_graph_max_bs=3, disable_cuda_graph_padding=True))[:3] == [1, 2, 3]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cuda_graph_max_bs": 0}, "--cuda-graph-max-bs must be 1 or more"),
        ({"cuda_graph_bs": (1, 0)}, "--cuda-graph-bs must be 1 or more"),
        ({"cuda_graph_bs": (1,), "disable_cuda_graph": True}, "exclude one another"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        graphs.wrap(ModuleRunner(torch.nn.Module(), GroupedAttention), TargetConfig(**flags), CPU)
