"""Decoders in few launches: the logits, states and caches of the modules that they are made from.

Triton's interpreter runs the kernels; tests/gpu does on a GPU.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from outrider.config import TargetConfig
from services.target.kernels.dispatch import choose
from services.target.model.cuda import graphs
from services.target.model.modules import ModuleRunner
from services.target.step.batch import Capture
from tests.support.target.cuda.interpreter import need_interpreter
from tests.support.target.decoders import (
    MODELS,
    cache_of,
    few_rows,
    module_of,
    random_batch,
    runners,
    written,
)
from tests.support.target.driving import engine_of, load_model, opening, random_tree, run
from tests.support.tiny import VOCAB, write_model

need_interpreter()

from services.target.kernels.cuda import fused_elementwise, small_batch_matmul  # noqa: E402
from services.target.kernels.cuda.fused_elementwise import Norm  # noqa: E402
from services.target.model.cuda import fused  # noqa: E402


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_step_is_that_of_the_modules(name, tmp_path):
    modules, few, probe = runners(written(tmp_path, name), "triton" if name == "llama" else "torch_native")
    rng = np.random.default_rng(1)
    batch, works = random_batch(rng, most=3, longest=50)
    rows = rng.integers(0, len(batch), 3)
    batch = replace(batch, capture=Capture((0, 1, 2), True, rows))
    results = []
    for runner in (modules, few):
        cache = cache_of(probe, works)
        outputs = runner.forward(batch, cache)
        results.append((outputs.logits, outputs.features, *cache.keys, *cache.values))
    assert results[0][0].std() > 0.1, "flat logits prove little"
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dim"), [("llama-bias", 32), ("llama", 24), ("qwen3", 32), ("gemma2", 32)])
@torch.inference_mode()
def test_a_step_of_a_few_rows_is_that_of_the_modules(name, dim, tmp_path, monkeypatch):
    monkeypatch.setattr(small_batch_matmul, "serves", lambda x, weight: True)
    modules, few, probe = runners(written(tmp_path, name, head_dim=dim), "torch_native")
    batch, works = few_rows(small_batch_matmul.ROWS)
    batch = replace(batch, capture=Capture((0, 1, 2), True, None))
    results = []
    for runner in (modules, few):
        cache = cache_of(probe, works)
        outputs = runner.forward(batch, cache)
        results.append((outputs.logits, outputs.features, *cache.keys, *cache.values))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_states_of_all_rows_do_not_change_as_the_step_goes_on(tmp_path):
    modules, few, probe = runners(written(tmp_path, "llama"), "torch_native")
    batch, works = random_batch(np.random.default_rng(2), most=3, longest=50)
    batch = replace(batch, capture=Capture((0, 1), False, None))
    found, expected = (runner.forward(batch, cache_of(probe, works)).features for runner in (few, modules))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_new_weights_reach_it(tmp_path):
    _, few, probe = runners(written(tmp_path, "llama-bias"), "torch_native")
    batch, works = random_batch(np.random.default_rng(3), most=3, longest=50)
    generator = torch.Generator().manual_seed(1)
    new = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in few.weights().items()}
    few.update(new)
    modules = ModuleRunner(module_of(tmp_path), choose("torch_native", torch.device("cpu")))
    assert modules.weights() == few.weights()
    modules.update(new)
    found, expected = (runner.forward(batch, cache_of(probe, works)).logits for runner in (few, modules))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_unsupported_models_have_a_reason(tmp_path):
    assert "type" in fused.unsupported_reason(module_of(write_model(tmp_path / "a", "qwen3_moe")))
    assert fused.unsupported_reason(module_of(write_model(tmp_path / "b", "llama"))) is None
    assert "biases" in fused.unsupported_reason(module_of(write_model(tmp_path / "c", "llama", mlp_bias=True)))
    odd = {"hidden_size": 40, "head_dim": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    module = module_of(write_model(tmp_path / "d", "llama", **odd))
    module.model.layers[0].mlp.down_proj.weight.data = torch.ones(40, 128).to(torch.float8_e4m3fn)
    assert "format" in fused.unsupported_reason(module)


def test_captured_fused_steps_give_the_same_text(tmp_path):
    plain = load_model(write_model(tmp_path, num_hidden_layers=1))
    requests = [opening(i, [5 + i, 6, 7, 5 + i, 6], max_tokens=4) for i in range(2)]

    def proposals():
        rng = np.random.default_rng(1)
        return lambda session_id, path: [random_tree(rng, session_id, path, VOCAB, 6)]

    expected = run(engine_of(plain), requests, proposals()).new
    _, few, _ = runners(tmp_path, "triton")
    runner = graphs.GraphRunner(few, [4, 12], graphs.direct)
    engine = engine_of(replace(plain, runner=runner))
    runner.capture(engine.cache, torch.device("cpu"))
    assert run(engine, requests, proposals()).new == expected


def test_torch_compile_finds_nothing_in_it(tmp_path, caplog):
    _, few, _ = runners(written(tmp_path, "llama"), "torch_native")
    with caplog.at_level("INFO"):
        assert graphs.wrap(few, TargetConfig(enable_torch_compile=True), torch.device("cpu")) is few
    assert "--enable-torch-compile has nothing to compile" in caplog.text


# --- kernels against their plain twins ---


def plain_norm(x, norm):
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.shift:
        return (scaled * (1 + norm.weight.float())).to(x.dtype)
    return scaled.to(x.dtype) * norm.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (2, 1000)])
@pytest.mark.parametrize("branch", [None, "added", "normed"])
def test_sums_and_norms(dtype, shift, rows, width, branch):
    torch.manual_seed(rows * width)
    norm, after = (Norm(torch.randn(width).to(dtype), eps, shift) for eps in (1e-5, 1e-3))
    residual, more = torch.randn(rows, width).to(dtype), torch.randn(rows, 2 * width).to(dtype)[:, :width]
    expected = residual.clone()
    if branch is not None:
        expected += plain_norm(more, after) if branch == "normed" else more
    found = fused_elementwise.add_norm(residual, more if branch else None, norm, after if branch == "normed" else None)
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(residual, expected, **tolerance)
    torch.testing.assert_close(found, plain_norm(expected, norm), **tolerance)


def storage(rows, kv_heads, dim, pool_dtype, page_size=4, pages=9):
    """Positions, slots (one of them padding's), cosines and sines, and pools with something in them."""
    rng = np.random.default_rng(dim)
    torch.manual_seed(dim)
    positions = torch.from_numpy(rng.integers(0, 50, rows))
    slots = torch.from_numpy(page_size + rng.permutation((pages - 1) * page_size)[:rows])
    slots[2] = 1
    angles = torch.arange(50)[:, None] * torch.rand(dim // 2)
    pools = [torch.randn(pages, page_size, kv_heads, dim).to(pool_dtype) for _ in range(2)]
    return positions, slots, (angles.cos(), angles.sin()), pools


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 16), ((3, 3), 20), ((8, 1), 80)])
@pytest.mark.parametrize("shift", [None, 0.0, 1.0])
def test_turning_and_storing(pool_dtype, heads, dim, shift):
    positions, slots, tables, pools = storage(7, heads[1], dim, pool_dtype)
    wide = torch.randn(7, (heads[0] + 2 * heads[1]) * dim)
    before = [pool.clone() for pool in pools]
    norms = None if shift is None else tuple(Norm(torch.randn(dim), eps, shift) for eps in (1e-5, 1e-2))

    def turned(x, norm):
        x = x if norm is None else plain_norm(x, norm)
        cosine, sine = (torch.cat([table[positions]] * 2, -1)[:, None] for table in tables)
        left, right = x.chunk(2, -1)
        return x * cosine + torch.cat([-right, left], -1) * sine

    q, k, v = wide.clone().unflatten(1, (-1, dim)).split([heads[0], heads[1], heads[1]], 1)
    found = fused_elementwise.rotate_and_store(wide, heads, positions, slots, tables, tuple(pools), norms)
    torch.testing.assert_close(found, turned(q, norms and norms[0]))
    live = slots >= pools[0].shape[1]
    for pool, old, new in zip(pools, before, (turned(k, norms and norms[1]), v), strict=True):
        old.flatten(0, 1)[slots[live]] = new[live].to(pool_dtype)
        torch.testing.assert_close(pool, old)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (3, 1500)])
def test_gates(gelu, rows, width):
    wide = 3 * torch.randn(rows, 2 * width)
    act = functional.gelu(wide[:, :width], approximate="tanh") if gelu else functional.silu(wide[:, :width])
    torch.testing.assert_close(fused_elementwise.gated(wide, gelu=gelu), act * wide[:, width:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 64), (64, 256), (50, 700)])
@pytest.mark.parametrize("kind", ["plain", "bias", "silu", "gelu"])
def test_products_of_a_few_rows(rows, outputs, inputs, kind):
    torch.manual_seed(rows + outputs)
    x, weight = torch.randn(rows, 2 * inputs)[:, :inputs], torch.randn(2 * outputs, inputs) / inputs**0.5
    if kind in ("silu", "gelu"):
        found = small_batch_matmul.gated(x, weight, gelu=kind == "gelu")
        gates, values = (x @ weight.T).chunk(2, 1)
        act = functional.gelu(gates, approximate="tanh") if kind == "gelu" else functional.silu(gates)
        expected = act * values
    else:
        bias = torch.randn(2 * outputs) if kind == "bias" else None
        found, expected = small_batch_matmul.linear(x, weight, bias), functional.linear(x, weight, bias)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 32), ((3, 1), 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_turn_and_store(pool_dtype, heads, dim, biased):
    positions, slots, tables, pools = storage(7, heads[1], dim, pool_dtype)
    inputs, outputs = 300, (heads[0] + 2 * heads[1]) * dim
    x, weight = torch.randn(7, inputs), torch.randn(outputs, inputs) / inputs**0.5
    bias = torch.randn(outputs) if biased else None
    assert small_batch_matmul.serves_rotary(heads, weight)
    others = [pool.clone() for pool in pools]
    found = small_batch_matmul.linear_rotary(x, weight, bias, heads, positions, slots, tables, tuple(pools))
    expected = fused_elementwise.rotate_and_store(
        functional.linear(x, weight, bias), heads, positions, slots, tables, tuple(others)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float8_e4m3fn: 0.1}[pool_dtype]
    for pool, other in zip(pools, others, strict=True):
        torch.testing.assert_close(pool.float(), other.float(), atol=tolerance, rtol=tolerance)


def test_few_rows_are_served_where_that_is_faster():
    weight = torch.zeros(4096, 64, dtype=torch.bfloat16)
    assert small_batch_matmul.serves(torch.zeros(16, 64, dtype=torch.bfloat16), weight)
    assert not small_batch_matmul.serves(torch.zeros(17, 64, dtype=torch.bfloat16), weight)
    assert not small_batch_matmul.serves(torch.zeros(1, 64, dtype=torch.bfloat16), weight[:1024])
    assert not small_batch_matmul.serves(torch.zeros(1, 64), weight.float())
