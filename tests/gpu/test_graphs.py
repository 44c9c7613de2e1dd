"""Captured steps against eager ones at every size, and torch.compile, on a GPU. Run by `make gpu`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.paging.allocator import NULL_PAGE
from services.target.kernels.dispatch import choose
from services.target.kernels.kv_cache import KVCache
from services.target.model.cuda.compiled import compiled
from services.target.model.cuda.graphs import CudaCapturer, GraphRunner
from services.target.model.modules import ModuleRunner
from services.target.step.batch import Capture, build
from tests.support.target.cuda.graphs import SHAPES, SIZES, modules
from tests.support.target.works import decoding
from tests.support.tiny import write_model

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def inner(tmp_path_factory):
    torch.backends.cuda.matmul.allow_tf32 = False
    module = modules(write_model(tmp_path_factory.mktemp("model"), sliding_window=9, family="mistral")).module
    return ModuleRunner(module.to(CUDA), choose("auto", CUDA))


def cache_like(works, cache=None):
    """A cache of random numbers, in free pages, too; or the given cache, filled in this way."""
    allocator = works[0].chunk.session.table.allocator
    cache = cache or KVCache(SHAPES, allocator.total_pages, allocator.page_size, torch.float32, CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    for pool in (*cache.keys, *cache.values):
        pool.normal_(generator=generator)
        pool[NULL_PAGE] = 0.0
    return cache


@torch.inference_mode()
def outcome(runner, works, cache):
    logits = runner.forward(build(works, CUDA), cache).logits.clone()
    return logits, [pool.clone() for pool in (*cache.keys, *cache.values)]


def check(inner, runner, rows, cache):
    works = decoding(rows)
    expected, pools = outcome(inner, works, cache_like(works, cache))
    found, found_pools = outcome(runner, works, cache_like(works, cache))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    for mine, its in zip(found_pools, pools, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-3, rtol=1e-3)
        assert not mine[NULL_PAGE].any()


def check_states(inner, runner, rows, wanted, cache):
    works = decoding(rows)
    capture = Capture((0, 2), True, np.array(wanted))
    batch = replace(build(works, CUDA), capture=capture)
    expected = inner.forward(batch, cache_like(works, cache)).features.clone()
    found = runner.forward(batch, cache_like(works, cache)).features
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def large_cache():
    return KVCache(SHAPES, 400, 4, torch.float32, CUDA)


def test_captured_steps_are_eager_ones_at_every_size(inner):
    cache = large_cache()
    runner = GraphRunner(inner, SIZES, CudaCapturer())
    runner.capture(cache, CUDA)
    assert {key.size for key in runner.steps} == set(SIZES)
    for rows in [*sorted({size + d for size in SIZES for d in (-1, 0, 1)} - {0}), 3, 16, 1]:
        check(inner, runner, rows, cache)


@torch.inference_mode()
def test_hidden_states_of_captured_steps_are_those_of_eager_ones(inner):
    """Of plain and of compiled modules, captured behind plain steps, beside which they share memory."""
    cache = large_cache()
    for modules_or_compiled in (inner, compiled(inner, 8)):
        runner = GraphRunner(modules_or_compiled, [4, 8], CudaCapturer())
        runner.capture(cache, CUDA)
        runner.expect(Capture((0, 2), True, None))
        assert runner.due
        while runner.due:
            runner.capture_next()
        assert {key.size for key in runner.steps if key.final} == {4, 8}
        for rows in (1, 4, 7, 8):
            check_states(inner, runner, rows, range(rows), cache)
            check_states(inner, runner, rows, range(0, rows, 2), cache)
            check(inner, runner, rows, cache)


def test_new_weights_reach_captured_steps(inner):
    cache = large_cache()
    runner = GraphRunner(inner, [4], CudaCapturer())
    runner.capture(cache, CUDA)
    works = decoding(4)
    before, _ = outcome(runner, works, cache_like(works, cache))
    norm = inner.module.get_decoder().norm.weight
    with torch.no_grad():
        norm.mul_(2.0)
    after, _ = outcome(runner, works, cache_like(works, cache))
    with torch.no_grad():
        norm.div_(2.0)
    torch.testing.assert_close(after, 2 * before, atol=1e-4, rtol=1e-4)


def test_compiled_steps_are_eager_ones(inner):
    cache = large_cache()
    fast = compiled(inner, 8)
    runner = GraphRunner(fast, [1, 8], CudaCapturer())
    runner.capture(cache, CUDA)
    assert {key.size for key in runner.steps} == {1, 8}
    for rows in (1, 2, 7, 8, 9):
        check(inner, runner, rows, cache)
