"""The compiled CPU kernels against their plain twins, on random ragged batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from outrider import native
from outrider.errors import ConfigError
from outrider.speculation.sampling import GREEDY_BELOW
from services.draft.kernels.base import Context
from services.draft.kernels.cpu import library
from services.draft.kernels.cpu.attention import cpu_attention
from services.draft.kernels.cpu.candidates import cpu_candidates
from services.draft.kernels.cpu.panels import PanelMaker
from services.draft.kernels.plain import plain_attention
from services.draft.model.layers.backend import choose
from services.draft.model.layers.config import Attention, Layer, Mlp, ModelConfig
from services.draft.model.layers.heads import TokenHead
from services.draft.model.layers.kv_cache import move_and_write
from services.draft.model.matrices import packed, products, quantized
from services.draft.model.programs.sampling import Sampling, candidates

pytestmark = pytest.mark.skipif(not library.available(), reason="the kernels are not available on this machine")

FORMATS = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
SIZES = [(48, 320, 1), (576, 96, 8), (1152, 70, 64), (77, 33, 13), (64, 32, 25)]


def normal(rng, *shape):
    return jnp.array(rng.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs", "rows"), SIZES)
def test_products(inputs, outputs, rows, dtype):
    rng = np.random.default_rng(rows)
    x, matrix = normal(rng, 2, rows, inputs).astype(dtype), normal(rng, inputs, outputs).astype(dtype)
    panels = PanelMaker().make(matrix)
    exact = x.astype(jnp.float32) @ matrix.astype(jnp.float32)
    for wanted in (dtype, jnp.float32):
        y = jax.jit(products.product, static_argnums=2)(x, panels, wanted)
        assert y.dtype == wanted
        tolerance = 1e-2 if wanted == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=tolerance, atol=tolerance * inputs**0.5)
    ids = jnp.array(rng.integers(outputs, size=(3, 2)))
    np.testing.assert_array_equal(products.columns(panels, ids, dtype), matrix.T[ids])


def test_rows_are_batch_invariant():
    rng = np.random.default_rng(0)
    x, matrix = normal(rng, 40, 96), PanelMaker().make(normal(rng, 96, 64))
    whole = products.product(x, matrix)
    for rows in (1, 7, 24, 25):
        np.testing.assert_array_equal(products.product(x[:rows], matrix), whole[:rows])


@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(64, 32, 1), (100, 70, 3), (576, 96, 40)])
def test_int4_products_are_those_of_the_rounded_weights(inputs, outputs, rows):
    """Plain twin: 16 values a block of 32 inputs between its ends; the kernels clip a little where that is nearer."""
    rng = np.random.default_rng(inputs)
    matrix = jnp.asarray(rng.standard_normal((inputs, outputs)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
    panels = PanelMaker(int4=True).make(matrix)
    assert panels.data.nbytes < 0.7 * -(-inputs // 64) * 64 * -(-outputs // 32) * 32
    y = np.asarray(products.product(x, panels, jnp.float32))
    blocks = np.zeros((-(-inputs // 32) * 32, outputs), np.float32)
    blocks[:inputs] = np.asarray(matrix, np.float32)
    blocks = blocks.reshape(-1, 32, outputs)
    low, high = blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)
    scale = (high - low) / 15
    rounded = (np.round((blocks - low) / scale) * scale + low).reshape(-1, outputs)[:inputs]
    exact, twin = (np.asarray(x) @ one for one in (np.asarray(matrix, np.float32), rounded))
    error, twin_error = (np.sqrt(np.mean((one - exact) ** 2)) for one in (y, twin))
    assert error < 1.05 * twin_error
    several = PanelMaker(int4=True).make(jnp.stack([matrix, 2 * matrix]))
    for index in (0, 1):
        found = products.product(x, several[jnp.int32(index)], jnp.float32)
        np.testing.assert_allclose(found, (1 + index) * y, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("dtype", FORMATS)
def test_products_of_8_bits(dtype):
    rng = np.random.default_rng(0)
    x, wide = normal(rng, 5, 100).astype(dtype), normal(rng, 100, 70)
    plain = quantized.quantize_params({"head": wide}, "int8")["head"]
    panels = packed.pack_params({"head": plain})["head"]
    y, exact = products.product(x, panels, jnp.float32), products.product(x.astype(jnp.float32), plain)
    assert np.abs(y - exact).max() < 0.01 * np.abs(exact).max()  # activations of 8 bits
    ids = jnp.arange(70)
    np.testing.assert_array_equal(products.columns(panels, ids, dtype), products.columns(plain, ids, dtype))


def test_one_matrix_of_several():
    rng = np.random.default_rng(0)
    x, experts = normal(rng, 3, 48), normal(rng, 4, 48, 70)
    panels = packed.pack_params({"experts_down": experts})["experts_down"]
    chosen = jax.jit(lambda x, panels, i: products.product(x, panels[i]))
    for i in range(4):
        np.testing.assert_allclose(chosen(x, panels, i), x @ experts[i], rtol=1e-5, atol=1e-5)


CASES = [
    # heads, key heads, size, planes, page, window, sinks, softcap
    (4, 2, 16, 2, 8, None, False, None),
    (9, 3, 64, 2, 16, 40, False, None),
    (8, 1, 72, 1, 4, None, True, 30.0),
    (7, 7, 20, 2, 64, 200, True, None),
]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_attention(case, dtype):
    heads, kv_heads, dim, planes, page, window, sinks, softcap = case
    sessions, rows, table, scratch = 3, 5, 700 // page, 64
    rng = np.random.default_rng(dim)
    prefix_kv = (sessions * table + 1) * page
    pool = normal(rng, prefix_kv + sessions * scratch, planes, kv_heads, dim).astype(dtype)
    q = normal(rng, sessions, rows, heads, dim).astype(dtype)
    visible = rng.integers(0, table * page + 1, (sessions, rows)).astype(np.int32)
    visible[0, :3] = 0
    mask = rng.random((sessions, rows, scratch)) < 0.2
    mask[0, 1] = mask[2] = False
    context = Context(
        jnp.array(1 + rng.permutation(sessions * table).reshape(sessions, table), jnp.int32), jnp.array(visible),
        jnp.array(prefix_kv + rng.permutation(sessions * scratch).reshape(sessions, scratch), jnp.int32),
        jnp.array(mask),
    )  # fmt: skip
    options = {
        "since": None if window is None else jnp.array(np.maximum(visible - window, 0)),
        "sinks": normal(rng, heads) if sinks else None, "softcap": softcap,
    }  # fmt: skip
    plain = jax.jit(lambda q, pool: plain_attention(q, pool, context, page, **options))(q, pool)
    seen = jax.jit(lambda q, pool: cpu_attention(q, pool, context, page, **options))(q, pool)
    assert seen.dtype == dtype
    np.testing.assert_allclose(seen.astype(jnp.float32), plain.astype(jnp.float32), atol=FORMATS[dtype])
    assert not np.any(seen[0, 1].astype(jnp.float32)), "a row that sees nothing gives 0"


def test_cache_is_changed_in_place():
    rng = np.random.default_rng(0)
    slots = rng.permutation(np.arange(1, 200))
    moves = np.zeros((2, 16), np.int32)
    moves[:, :9] = slots[:18].reshape(2, 9)
    moves[0, :4], moves[1, 4:8] = slots[30:34], slots[30:34]  # some are read and written
    written = np.array([0, *slots[40:46], 0], np.int32)
    pool, rows = rng.standard_normal((200, 2, 3, 8)), normal(rng, len(written), 2, 3, 8)
    change = jax.jit(move_and_write, static_argnums=4, donate_argnums=0)
    pools = [jnp.array(pool, jnp.float32) for _ in range(2)]
    place = pools[1].unsafe_buffer_pointer()
    plain, compiled = (
        change(own, moves, written, rows, kind) for own, kind in zip(pools, ("plain", "cpu"), strict=True)
    )
    np.testing.assert_array_equal(plain[1:], compiled[1:])
    np.testing.assert_array_equal(compiled[0], pool[0].astype(np.float32))
    assert compiled.unsafe_buffer_pointer() == place


@pytest.mark.parametrize("mapped", [False, True])
def test_candidates(mapped):
    rng = np.random.default_rng(0)
    sessions, rows, entries = 6, 3, 5003
    logits = normal(rng, sessions, rows, entries) * 4
    ids = jnp.array(np.sort(rng.choice(20_000, entries, replace=False)), jnp.int32) if mapped else None
    limit = 15_000 if mapped else 4_000
    sampling = Sampling(
        jnp.array([0, 1, 0.7, 1.3, 1, 1], jnp.float32), jnp.array([0, 0, 20, 0, 0, 50], jnp.int32),
        jnp.array([1, 1, 1, 0.9, 1, 0.8], jnp.float32), jnp.array([0, 0, 0, 0, 0.05, 0.01], jnp.float32),
        jnp.array(rng.integers(0, 2**32, (sessions, rows, 2), dtype=np.uint32)),
    )  # fmt: skip
    real = (jnp.arange(entries) if ids is None else ids) < limit
    tokens, scores = jax.jit(candidates, static_argnums=2)(jnp.where(real, logits, -1e30), sampling, 4, ids)
    found, log_scores = jax.jit(cpu_candidates, static_argnums=(2, 4))(logits, sampling, 4, ids, limit)
    kept = scores > -1e4  # what a filter removed is in no order
    np.testing.assert_array_equal(jnp.where(kept, found, -1), jnp.where(kept, tokens, -1))
    np.testing.assert_allclose(jnp.where(kept, log_scores, 0), jnp.where(kept, scores, 0), atol=1e-5)
    assert np.all(log_scores[~kept] < -1e4)
    assert kept[:4].all()


@pytest.mark.parametrize(("temperature", "greedy"), [(0.99 * GREEDY_BELOW, True), (1.01 * GREEDY_BELOW, False)])
def test_greedy_threshold_of_temperatures(temperature, greedy):
    off = jnp.zeros(1)
    sampling = Sampling(off + temperature, off.astype(jnp.int32), off + 1, off, jnp.zeros((1, 1, 2), jnp.uint32))
    logits = jnp.zeros((1, 1, 40)).at[0, 0, :2].set(1.0)
    for log_scores in (cpu_candidates(logits, sampling, 2, None, 40)[1], candidates(logits, sampling, 2)[1]):
        assert (log_scores[0, 0, 0] < -1.5) == greedy  # else the noise alone decides between two


def test_ties_go_to_the_first_candidate():
    logits = jnp.zeros((1, 1, 40)).at[0, 0, 30:].set(1.0)
    off = jnp.zeros(1)
    sampling = Sampling(off, off.astype(jnp.int32), off + 1, off, jnp.zeros((1, 1, 2), jnp.uint32))
    assert cpu_candidates(logits, sampling, 3, None, 100)[0].tolist() == [[[30, 31, 32]]]


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_temperatures_are_greedy_below_the_bound_of_all(share):
    logits = jnp.arange(40, dtype=jnp.float32)[None, None]
    off = jnp.zeros(1)
    sampling = Sampling(
        off + share * GREEDY_BELOW, off.astype(jnp.int32), off + 1, off, jnp.zeros((1, 1, 2), jnp.uint32)
    )
    expected, scores = candidates(logits, sampling, 3)
    tokens, log_scores = cpu_candidates(logits, sampling, 3, None, 100)
    assert tokens.tolist() == expected.tolist() == [[[39, 38, 37]]]
    np.testing.assert_allclose(log_scores, scores, rtol=1e-5)
    assert (log_scores[0, 0, 1] < -1e5) == (share > 1), "what is sampled is all but certain, what is greedy is not"


def test_without_a_compiler_plain_jax_serves(monkeypatch, caplog):
    library.load.cache_clear()
    monkeypatch.setattr(native.Library, "compiled", _no_compiler)
    assert chosen("auto") == "plain"
    assert "there is no C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match="--draft-attention-backend cpu is not available: there is no C"):
        chosen("cpu")
    monkeypatch.undo()
    library.load.cache_clear()
    assert chosen("auto") == "cpu"
    assert chosen("auto", jnp.float16) == chosen("plain") == "plain"


def test_heads_that_are_too_wide_are_left_to_plain_jax(caplog):
    assert chosen("auto", head_dim=1024) == "cpu"
    assert chosen("auto", head_dim=1025) == "plain"
    assert "heads of at most 1024 dimensions, not of 1025" in caplog.text


def chosen(wanted, dtype=jnp.float32, head_dim=16):
    layer = Layer(Attention(64, 4, 2, head_dim, None), Mlp(64), 1e-5)
    config = ModelConfig("Llama", 320, 64, (layer,), 512, TokenHead(1e-5))
    return choose(wanted, jax.devices()[0], config, dtype, 16)


def _no_compiler(library):
    raise native.Unavailable("there is no C++ compiler (g++ or clang++); install one")
