"""The draft's attention kernel on an accelerator of JAX's, against its plain twin, on shapes of real models.

`make gpu` runs it where JAX has its GPU, which takes jax[cuda12] or jax[cuda13]; on a TPU, `pytest -m gpu` does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.draft.drafters.feature import GROWTHS
from services.draft.formats.decoders import load_params, read_config
from services.draft.kernels.base import Paging
from services.draft.kernels.plain import plain_attention
from services.draft.model.layers.backend import attention, choose
from services.draft.model.layers.config import Attention
from services.draft.model.layers.pallas_backend import with_cache_for
from services.draft.model.layers.rope import Rope
from services.draft.sessions.batch import Growth, StepShape
from tests.support.checkpoints.heads import write_pair
from tests.support.draft.fed_sessions import FedSession
from tests.support.draft.helpers import GREEDY, feature_engine, settle, standalone
from tests.support.draft.helpers import request as opening
from tests.support.draft.lowering import check_in_place, head_of, step_of
from tests.support.draft.ragged import Batch, draw
from tests.support.draft.stepping import PAGE, Stepper
from tests.support.draft.trees import check_same_tree, tree_of
from tests.support.tiny import VOCAB, write_model

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

KERNELS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
# Largest error of a result against the twin's, whose products and sums are in float32.
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
BATCHES = {
    "Llama-8B, rows": Batch(16, 1, (32, 8), 128, 16, 2000),
    "Llama-8B, nodes": Batch(7, 4, (32, 8), 128, 16, 3000),
    "Llama-8B, one long session": Batch(1, 8, (32, 8), 128, 64, 30_000),
    "Llama-8B, a chunk": Batch(2, 256, (32, 8), 128, 64, 3000),
    "SmolLM2": Batch(5, 4, (9, 3), 64, 16, 2048),
    "Gemma 2": Batch(3, 8, (8, 4), 256, 16, 6000, window=4096, softcap=50.0),
    "gpt-oss": Batch(4, 4, (64, 8), 64, 64, 2000, window=128, sinks=True),
    "DeepSeek": Batch(2, 8, (128, 1), 576, 64, 2000, sides=1),
    "heads of 80": Batch(2, 8, (32, 32), 80, 16, 2048),
    "heads of 96, pages of one": Batch(2, 8, (32, 8), 96, 1, 700),
}


@pytest.fixture(scope="module")
def backend():
    found = KERNELS.get(jax.default_backend())
    if found is None:
        pytest.skip(f"JAX computes on {jax.default_backend()}; with jax[cuda12] or jax[cuda13] it finds a GPU")
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", BATCHES)
def test_the_kernel_equals_its_twin(backend, name, dtype):
    if backend == "pallas_tpu" and dtype == "float16":
        pytest.skip("TPUs have no float16, which choose() reports")
    batch = BATCHES[name]
    q, pool, context, options = draw(batch)
    narrow_q, narrow_pool = q.astype(dtype), pool.astype(dtype)
    if backend == "pallas_tpu":
        found_pool = jnp.pad(narrow_pool, ((0, 0),) * 3 + ((0, -batch.dim % 128),))
    else:
        found_pool = narrow_pool
    compute = jax.jit(attention, static_argnums=3, static_argnames="softcap")
    found = compute(narrow_q, found_pool, context, Paging(batch.page_size, backend), **options)
    with jax.default_matmul_precision("highest"):
        wide_q, wide_pool = narrow_q.astype(jnp.float32), jnp.nan_to_num(narrow_pool.astype(jnp.float32))
        expected = plain_attention(wide_q, wide_pool, context, batch.page_size, **options)
    assert float(jnp.abs(expected).max()) > 0.02  # the more keys, the smaller is their mean
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("shape", [StepShape(1, 1, 1), StepShape(16, 4, 4), StepShape(1, 256, 1)], ids=str)
def test_a_step_updates_its_pools_in_place(backend, shape):
    config = with_cache_for(head_of(Attention(256, 32, 8, 128, Rope(1e4))), backend)
    trace, pool_bytes = step_of(config, Paging(16, backend), shape, jnp.bfloat16)
    check_in_place(trace.lower().compile(), pool_bytes)


def test_a_model_drafts_the_same_with_either_kernel(backend, tmp_path):
    write_model(tmp_path, "qwen3", head_dim=24)
    config = read_config(tmp_path)
    params = load_params(tmp_path, config, jnp.float32)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 21).tolist()

    def run(config, paging):
        model = Stepper(config, params, tokens, paging)
        logits = [model.run(16, feed=16), model.run(16, feed=5)]
        model.session.grower.add(-1, [5, 6], [-1, -1], [-0.1, -1.0])
        return np.concatenate([*(x[:5] for x in logits), model.run(4, nodes=(0, 1))[:2]])

    with jax.default_matmul_precision("highest"):
        plain = run(config, Paging(PAGE))
        found = run(with_cache_for(config, backend), Paging(PAGE, backend))
    np.testing.assert_allclose(found, plain, atol=2e-3)


@pytest.mark.parametrize("shape", GROWTHS, ids=str)
def test_several_levels_in_one_program_update_their_pools_in_place(backend, shape):
    config = with_cache_for(head_of(Attention(256, 32, 8, 128, Rope(1e4))), backend)
    trace, pool_bytes = step_of(config, Paging(16, backend), shape, jnp.bfloat16)
    check_in_place(trace.lower().compile(), pool_bytes)


def test_adaptive_trees_of_one_program_equal_those_of_rounds(backend, tmp_path):
    """On accelerators engines grow several levels in one program by themselves."""
    target, folder, _ = write_pair(tmp_path, "EAGLE3", max_position_embeddings=256)
    trees = []
    for fused in (True, False):
        engine = feature_engine("EAGLE3", folder, target)
        assert any(isinstance(shape.tree, Growth) for shape in engine.drafter.shapes)
        engine.drafter.set_expansion_shapes([StepShape(1, 4, 4)])
        if not fused:
            engine.drafter.grow_by_levels()
        session = FedSession(engine, 1, 12, GREEDY)
        session.feed(0)
        settle(engine)
        floor = engine.limits.log_floor + 1e-2
        trees.append({path: score for path, score in tree_of(engine, 1).items() if score > floor})
    assert len(trees[1]) > 10
    check_same_tree(trees[0], trees[1])


def test_an_engine_takes_the_kernel_by_itself(backend, tmp_path):
    write_model(tmp_path, "llama")
    device = jax.devices()[0]
    assert choose("auto", device, read_config(tmp_path), jnp.bfloat16, 16) == backend
    engine = standalone(tmp_path)
    for drafter in engine.drafters:
        drafter.warm_up()
    engine.open(opening(1, list(range(4, 90))))
    proposed = [proposal for output in settle(engine) for proposal in output.proposals]
    assert sum(len(proposal.tokens) for proposal in proposed) > 4
