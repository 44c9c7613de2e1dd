"""Decoders in few launches on a GPU, and products of a few rows on shapes of real models. Run by `make gpu`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from outrider.config import TargetConfig
from services.target.kernels.cuda import fused_elementwise, small_batch_matmul, small_batch_matmul_gluon
from services.target.model.cuda.fused import FusedRunner
from services.target.model.cuda.graphs import CudaCapturer, GraphRunner
from services.target.model.loading.load import load
from services.target.step.batch import Capture
from tests.support.target.decoders import MODELS, cache_of, few_rows, random_batch, runners, written
from tests.support.tiny import write_model

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda")


def error(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_step_is_that_of_the_modules(name, dtype, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    modules, few, probe = runners(written(tmp_path, name, intermediate_size=2080), "triton", CUDA, dtype)
    rng = np.random.default_rng(1)
    batch, works = random_batch(rng, CUDA)
    batch = replace(batch, capture=Capture((0, 1, 2), True, rng.integers(0, len(batch), 3)))
    results = []
    for runner in (modules, few):
        cache = cache_of(probe, works, CUDA, dtype)
        outputs = runner.forward(batch, cache)
        results.append((outputs.logits, outputs.features, *cache.keys, *cache.values))
    tolerance = 1e-3 if dtype == torch.float32 else 1e-1
    for found, expected in zip(results[1], results[0], strict=True):
        assert error(found, expected) < tolerance / 2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.float().std()) * 4)


WIDE = {"hidden_size": 2048, "intermediate_size": 2112, "head_dim": 128, "num_attention_heads": 16,
        "num_key_value_heads": 4}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3", "gemma2"])
@torch.inference_mode()
def test_a_step_of_a_few_rows_waits_for_every_launch_of_its_chain(name, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    exact, _, _ = runners(written(tmp_path, name, **WIDE), "triton", CUDA)
    modules, few, probe = runners(tmp_path, "triton", CUDA, torch.bfloat16)
    batch, works = few_rows(small_batch_matmul.ROWS, CUDA)
    results = []
    for runner, dtype in ((exact, torch.float32), (modules, torch.bfloat16), (few, torch.bfloat16)):
        cache = cache_of(probe, works, CUDA, dtype)
        results.append((runner.forward(batch, cache).logits.clone(), *cache.keys, *cache.values))
    for expected, rounded, found in zip(*results, strict=True):  # a model of random weights blows rounding up
        assert error(found, expected) < 2 * error(rounded, expected) + 5e-3
    cache = cache_of(probe, works, CUDA, torch.bfloat16)
    captured = GraphRunner(few, [small_batch_matmul.ROWS], CudaCapturer())
    captured.capture(cache, CUDA)
    first = captured.forward(batch, cache).logits.clone()
    for found, expected in zip((first, *cache.keys, *cache.values), results[2], strict=True):
        assert error(found, expected) < 1e-2
    for _ in range(200):
        assert torch.equal(captured.forward(batch, cache).logits, first)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_products_turn_and_store(rows, pool_dtype, biased):
    torch.manual_seed(rows)
    heads, dim, inputs = (32, 8), 128, 4096
    x = torch.randn(rows, inputs, device=CUDA).bfloat16()
    weight = (torch.randn((heads[0] + 2 * heads[1]) * dim, inputs, device=CUDA) / inputs**0.5).bfloat16()
    bias = torch.randn(len(weight), device=CUDA).bfloat16() if biased else None
    positions = torch.randint(0, 500, (rows,), device=CUDA)
    slots = torch.randperm(100, device=CUDA)[:rows] + 16
    angles = torch.arange(500, device=CUDA)[:, None] * torch.rand(dim // 2, device=CUDA)
    tables = angles.cos(), angles.sin()
    pools = [torch.zeros(8, 16, heads[1], dim, device=CUDA).to(pool_dtype) for _ in range(2)]
    others = [pool.clone() for pool in pools]
    found = small_batch_matmul.linear_rotary(x, weight, bias, heads, positions, slots, tables, tuple(pools))
    wide = small_batch_matmul.linear(x, weight, bias)
    expected = fused_elementwise.rotate_and_store(wide, heads, positions, slots, tables, tuple(others))
    assert torch.equal(found, expected)
    assert all(torch.equal(pool.float(), other.float()) for pool, other in zip(pools, others, strict=True))


def test_matrices_are_on_their_way_before_the_rows_where_widths_are_even():
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs compute capability 9 or 10")
    x, weight = torch.zeros(4, 512, device=CUDA).bfloat16(), torch.zeros(2048, 512, device=CUDA).bfloat16()
    assert small_batch_matmul_gluon.serves(x, weight)
    assert not small_batch_matmul_gluon.serves(x[:, :500], weight[:, :500])
    assert not small_batch_matmul_gluon.serves(x.flatten()[1 : 1 + 512 * 3].view(3, 512), weight)


def test_models_are_loaded_so(tmp_path):
    config = TargetConfig(device="cuda", dtype="bfloat16", max_total_tokens=2048)
    assert isinstance(load(write_model(tmp_path), config).runner.runner, FusedRunner)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(6144, 4096), (4096, 14336), (3072, 1024), (2048, 256), (2050, 512), (2050, 1000), (28672, 4096)],
)
def test_products_of_a_few_rows(dtype, gated, ahead, outputs, inputs, monkeypatch):
    if not ahead:
        monkeypatch.setattr(small_batch_matmul_gluon, "serves", lambda x, weight: False)
    torch.manual_seed(outputs)
    x = torch.randn(16, inputs, device=CUDA, dtype=dtype)
    weight = (torch.randn(outputs, inputs, device=CUDA) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, device=CUDA, dtype=dtype)
    wide = x.double() @ weight.double().T
    if gated:
        found = small_batch_matmul.gated(x, weight)
        gates, values = wide.chunk(2, 1)
        expected = functional.silu(gates) * values
    else:
        found, expected = small_batch_matmul.linear(x, weight, bias), wide + bias.double()
    assert (found.double() - expected).norm() / expected.norm() < 5e-3
    for rows in (1, 2, 7, 15):
        again = (
            small_batch_matmul.gated(x[:rows], weight) if gated else small_batch_matmul.linear(x[:rows], weight, bias)
        )
        assert torch.equal(again, found[:rows])
