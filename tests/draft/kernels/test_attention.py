"""The Pallas kernels, interpreted, against their plain twin; the choice of kernels, and refusals."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from outrider.errors import ConfigError
from services.draft.formats.decoders import load_params, read_config
from services.draft.kernels.base import Paging
from services.draft.kernels.pallas_gpu import Tile, gpu_attention, parts, splits_for
from services.draft.kernels.pallas_tpu import tpu_attention
from services.draft.kernels.plain import plain_attention
from services.draft.model.layers.backend import attention, choose
from services.draft.model.layers.config import LatentAttention
from services.draft.model.layers.pallas_backend import with_cache_for
from services.draft.model.layers.rope import Rope
from tests.support.draft.ragged import Batch, draw
from tests.support.draft.stepping import PAGE, Stepper
from tests.support.tiny import VOCAB, write_model

TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-2, "float16": 4e-3}
BATCHES = {
    "a row": Batch(3, 1, (4, 2), 16, 16, 40),
    "long, narrow pages": Batch(2, 4, (4, 4), 32, 1, 300),
    "odd pages, odd groups": Batch(3, 3, (9, 3), 24, 12, 100),
    "windows, sinks, softcap": Batch(4, 8, (6, 2), 64, 8, 300, window=70, sinks=True, softcap=4.0),
    "a chunk": Batch(2, 90, (4, 2), 16, 16, 200, window=100),
    "shared keys and values": Batch(2, 3, (20, 1), 72, 8, 80, sides=1),
    "bfloat16": Batch(3, 4, (8, 2), 128, 64, 150, dtype="bfloat16", sinks=True),
    "bfloat16, odd heads": Batch(2, 2, (3, 3), 96, 16, 290, dtype="bfloat16", window=33),
    "float16": Batch(2, 2, (2, 1), 80, 16, 60, dtype="float16"),
}


def expected(q, pool, context, page_size, options):
    """The twin's result."""
    return np.asarray(whole(plain_attention)(q, pool, context, page_size, **options), np.float32)


def whole(kernel):
    """A kernel as one program; outside of jit it would be compiled operation by operation."""

    def run(q, pool, context, page_size, **options):
        return jax.jit(lambda q, pool, context: kernel(q, pool, context, page_size, **options))(q, pool, context)

    return run


def widened(pool):
    """A pool padded for TPUs."""
    return jnp.pad(pool, ((0, 0),) * 3 + ((0, -pool.shape[-1] % 128),), constant_values=0)


@pytest.fixture(autouse=True)
def _compiled_quickly():
    """Interpreted kernels become large programs that run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BATCHES)
def test_kernels_equal_their_twin(name):
    batch = BATCHES[name]
    q, pool, context, options = draw(batch)
    truth = expected(q, pool, context, batch.page_size, options)
    assert np.abs(truth).max() > 0.1

    def agrees(found):
        assert found.dtype == q.dtype
        np.testing.assert_allclose(np.asarray(found, np.float32), truth, atol=TOLERANCE[batch.dtype])

    agrees(whole(gpu_attention)(q, pool, context, batch.page_size, **options, interpret=True))
    if batch.dtype != "float16":  # which TPUs do not know
        # Its memory holds no numbers until a copy has come, and races are found.
        run = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
        agrees(whole(tpu_attention)(q, widened(pool), context, batch.page_size, **options, interpret=run))
        assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("splits", [2, 5])
def test_shares_of_a_context_are_merged(splits):
    batch = Batch(4, 3, (4, 2), 16, 4, 150, window=130, sinks=True, softcap=3.0)
    q, pool, context, options = draw(batch, seed=splits)
    tile = Tile(16, 16, 4, 2)
    found = gpu_attention(q, pool, context, 4, **options, interpret=True, tile=tile, splits=splits)
    np.testing.assert_allclose(found, expected(q, pool, context, 4, options), atol=2e-6)


@pytest.mark.parametrize("backend", ["pallas_gpu", "pallas_tpu"])
def test_rows_without_visible_keys_give_zeros(backend):
    q, pool, context, _ = draw(Batch(2, 2, (2, 2), 128, 8, 40))
    nothing = context._replace(visible=context.visible * 0, scratch_mask=context.scratch_mask & False)
    found = attention(q, pool, nothing, Paging(8, backend, True))
    np.testing.assert_array_equal(found, 0)


def test_heads_are_cut_into_powers_of_two():
    assert parts(576) == [(0, 512), (512, 64)]
    assert parts(96) == [(0, 64), (64, 32)]
    assert parts(24) == [(0, 16), (16, 16)]
    assert parts(128) == [(0, 128)]


def test_few_sessions_share_long_contexts():
    assert splits_for(programs=8, tokens=32768) == 32
    assert splits_for(programs=64, tokens=32768) == 4
    assert splits_for(programs=8, tokens=1024) == 4
    assert splits_for(programs=1000, tokens=32768) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["pallas_gpu", "pallas_tpu"])
def test_a_model_drafts_the_same_with_either_kernel(tmp_path, backend):
    write_model(tmp_path, "qwen3", head_dim=24)
    config = read_config(tmp_path)
    params = load_params(tmp_path, config, jnp.float32)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 21).tolist()

    def run(config, paging):
        model = Stepper(config, params, tokens, paging)
        logits = [model.run(16, feed=16), model.run(16, feed=5)]
        model.session.grower.add(-1, [5, 6], [-1, -1], [-0.1, -1.0])
        logits.append(model.run(4, nodes=(0, 1)))
        model.commit([5])
        model.session.grower.add(-1, [7], [-1], [-0.1])
        return np.concatenate([*(x[:5] for x in logits), model.run(4, nodes=(0,))])

    plain = run(config, Paging(PAGE))
    found = run(with_cache_for(config, backend), Paging(PAGE, backend, True))
    np.testing.assert_allclose(found, plain, atol=2e-5)


# --- the choice ---


def device(platform, **facts):
    return SimpleNamespace(platform=platform, **facts)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, "llama")
    return read_config(folder)


@pytest.mark.parametrize(
    ("where", "wanted", "chosen"),
    [
        (device("cpu"), "plain", "plain"),
        (device("gpu", compute_capability="9.0"), "auto", "pallas_gpu"),
        (device("gpu", compute_capability="9.0"), "plain", "plain"),
        (device("gpu", compute_capability="7.5"), "auto", "plain"),
        (device("gpu", compute_capability="gfx942"), "pallas", "pallas_gpu"),
        (device("tpu"), "auto", "pallas_tpu"),
        (device("tpu"), "pallas", "pallas_tpu"),
    ],
)
def test_a_device_gets_its_kernel(config, where, wanted, chosen):
    assert choose(wanted, where, config, jnp.bfloat16, 16) == chosen


@pytest.mark.parametrize(
    ("where", "dtype", "reason"),
    [
        (device("cpu"), jnp.float32, "needs a GPU or a TPU, and the draft computes on cpu; leave it out"),
        (device("gpu", compute_capability="7.5"), jnp.bfloat16, "compute capability 8.0 or more, not 7.5"),
        (device("tpu"), jnp.float16, "does not support float16 on TPUs; set --draft-dtype bfloat16"),
    ],
)
def test_unsupported_configurations_are_refused(config, where, dtype, reason):
    with pytest.raises(ConfigError, match=f"--draft-attention-backend pallas .*{reason}"):
        choose("pallas", where, config, dtype, 16)


def test_latent_caches_on_tpus_lie_in_whole_rows(config):
    latent = LatentAttention(48, 4, 0, 512, 128, 64, 128, Rope(1e4), 0.1)
    model = replace(config, layers=(replace(config.layers[0], attention=latent),))
    with pytest.raises(ConfigError, match="--draft-page-size must be a multiple of 8, not 4"):
        choose("pallas", device("tpu"), model, jnp.bfloat16, 4)
    assert choose("auto", device("tpu"), model, jnp.bfloat16, 4) == "plain"
    chosen = choose("auto", device("tpu"), model, jnp.bfloat16, 16)
    assert with_cache_for(model, chosen).layers[0].attention.kv_shape == (1, 1, 640)
    assert with_cache_for(model, "pallas_gpu") == model
    assert with_cache_for(config, chosen).cache_numbers() == 2 * 2 * 2 * 128
