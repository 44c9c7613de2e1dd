"""Quantized weights in every kind of draft: their values, their error, and unsupported formats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from outrider.config import DraftConfig
from outrider.errors import ConfigError
from services.draft.formats.decoders import read_decoder
from services.draft.formats.eagle import read_eagle
from services.draft.formats.mtp import read_mtp
from services.draft.formats.target import read_target
from services.draft.kernels.cpu.panels import Panels
from services.draft.model.matrices.products import product
from services.draft.model.matrices.quantized import QuantizedWeight, quantize_params
from services.draft.process.app import build
from tests.support.checkpoints.heads import eagle, write_head
from tests.support.checkpoints.mtp import write_mtp
from tests.support.draft.helpers import request, settle, standalone
from tests.support.draft.stepping import Stepper
from tests.support.tiny import VOCAB, write_model

RNG = np.random.default_rng(6)
TOKENS = RNG.integers(4, VOCAB, 12).tolist()


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
def test_each_output_has_its_own_scale(kind, error):
    """error: of a number, relative to its column's largest one (int8) or to itself (fp8, with a 3-bit mantissa)."""
    wide = RNG.standard_normal((64, 48)).astype(np.float32) * np.logspace(-4, 3, 48, dtype=np.float32)
    wide[:, 7] = 0.0
    (matrix,) = quantize_params({"head": jnp.asarray(wide)}, kind).values()
    assert isinstance(matrix, QuantizedWeight)
    assert matrix.numbers.dtype.itemsize == 1
    again = np.asarray(matrix.numbers, np.float32) * np.asarray(matrix.scales)
    size = np.abs(wide).max(0) if kind == "int8" else np.maximum(np.abs(wide), np.abs(wide).max(0) * 2.0**-14)
    assert np.all(np.abs(again - wide) <= error * size * 1.001)
    x = RNG.standard_normal((3, 64)).astype(np.float32)
    np.testing.assert_allclose(product(jnp.asarray(x), matrix), x @ again, rtol=1e-4, atol=1e-4 * np.abs(again).max())


def drafts(kind, folder):
    if kind == "llama, tied":
        return read_decoder(write_model(folder, tie_word_embeddings=True))
    if kind == "eagle of a tied target":
        target = write_model(folder, tie_word_embeddings=True)
        return read_eagle(write_head(folder / "head", *eagle(target)), read_target(target))
    model = write_mtp(folder, {"experts, latent attention": "deepseek-v3", "windows": "mimo-v2"}[kind])
    return read_mtp(model, read_target(model))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["llama, tied", "eagle of a tied target", "experts, latent attention"])
def test_quantized_model_equals_the_model_with_rounded_weights(tmp_path, kind):
    draft = drafts(kind, tmp_path / "model")
    params = draft.load(jnp.float32)
    small = quantize_params(params, "int8")

    def quantized(x):
        return isinstance(x, QuantizedWeight)

    found = [leaf for leaf in jax.tree.leaves(small, is_leaf=quantized) if quantized(leaf)]
    assert len(found) >= 5
    rounded = jax.tree.map(
        lambda leaf: leaf.numbers.astype(jnp.float32) * leaf.scales[..., None, :] if quantized(leaf) else leaf,
        small,
        is_leaf=quantized,
    )
    work = {"feed": 11}
    if draft.config.head.uses_features:
        work["features"] = RNG.standard_normal((11, draft.config.hidden_size)).astype(np.float32)
    narrowed, wide, plain = (Stepper(draft.config, p, TOKENS).run(12, **work)[:11] for p in (small, rounded, params))
    np.testing.assert_allclose(narrowed, wide, rtol=1e-3, atol=1e-3 * np.abs(wide).max())
    assert np.corrcoef(narrowed.ravel(), plain.ravel())[0, 1] > 0.99
    assert not np.allclose(narrowed, plain, rtol=1e-5)


def test_service_with_quantized_weights(tmp_path):
    folder = write_model(tmp_path / "model")
    engine = standalone(folder, speculative_draft_model_quantization="int8")
    assert is_narrow(engine.drafter.runner.params["head"])
    engine.open(request(1, TOKENS))
    assert any(output.proposals for output in settle(engine))
    for kind in ("unquant", None):
        engine = standalone(folder, speculative_draft_model_quantization=kind)
        assert not is_narrow(engine.drafter.runner.params["head"])


def is_narrow(matrix):
    return isinstance(matrix, QuantizedWeight) or (isinstance(matrix, Panels) and matrix.scales is not None)


def config(folder, **flags):
    return DraftConfig(
        speculative_algorithm="STANDALONE", speculative_draft_model_path=str(folder), max_running_requests=2,
        draft_dtype="float32", **flags,
    )  # fmt: skip


def test_unsupported_formats_and_devices_are_refused(tmp_path):
    folder = write_model(tmp_path / "model")
    for flags, message in (
        ({"speculative_draft_model_quantization": "awq"}, "quantization awq is not supported; expected one of int8"),
        ({"draft_device": "cuda"}, "--draft-device cuda: JAX has no such device"),
        ({"draft_device": "cpu:x"}, "--draft-device cpu:x has no index"),
        ({"draft_device": "cpu:9"}, "--draft-device cpu:9 needs 10 devices; there are"),
        ({"draft_tp_size": 0}, "--draft-tp-size must be 1 or more"),
        ({"draft_mem_fraction_static": 1e-9}, "--draft-mem-fraction-static 1e-09 of"),
        ({"draft_mem_fraction_static": 1.5}, r"must lie in \(0, 1\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(config(folder, **flags))


def test_the_fraction_of_memory_holds_weights_and_cache(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model")
    engine, _ = build(config(folder))
    assert engine.load().total_pages * 16 == 512 * 2 + 2 * 64  # no more than the sessions can use
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.drafter.runner.params))
    token = engine.drafter.runner.config.cache_numbers() * 4
    monkeypatch.setattr("services.draft.model.parallel.devices.memory_bytes", lambda _: 2 * (weights + 320 * token))
    engine, _ = build(config(folder, draft_mem_fraction_static=0.5))
    assert engine.load().total_pages == 320 // 16
