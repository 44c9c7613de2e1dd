"""The CUDA kernel, run by Triton's interpreter on CPU tensors, against its plain twin."""

import os

import numpy as np
import pytest
import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.batch import build, pad, tree_mask
from services.target.engine import TargetEngine
from services.target.kernels import choose
from services.target.kernels.grouped import GroupedAttention
from services.target.kernels.ragged import Load, Ragged, ancestor_words
from services.target.kernels.reference import paged_attention
from services.target.kv_cache import KVCache, LayerShape
from tests.target.driving import opening, random_tree, run
from tests.target.test_kernels import random_works
from tests.tiny import VOCAB, write_model

triton = pytest.importorskip("triton", reason="Triton is not installed")
if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip("Triton's interpreter before 3.7 does not work with NumPy 2.4", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU, where tests/gpu runs the kernels themselves", allow_module_level=True)

from services.target.kernels import triton_attention  # noqa: E402
from services.target.kernels.triton_attention import Tile, TritonAttention  # noqa: E402

CPU = torch.device("cpu")
SMALL = Tile(lanes=16, keys=16, split=32, warps=4, stages=2)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def case(seed, heads=(4, 2), dims=(16, 16), page_size=16, dtype=torch.float32, sessions=3, pool_dtype=None):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    works = random_works(rng, page_size, sessions)
    batch = build(works, CPU)
    pages = works[0].chunk.session.table._allocator.total_pages
    cache = KVCache([LayerShape(heads[1], *dims)], pages, page_size, pool_dtype or dtype, CPU)
    for pool in (cache.keys[0], cache.values[0]):
        pool.copy_(torch.full(pool.shape, torch.nan))  # what nobody wrote must not be read
        pool[0] = 0.0
    for span in batch.spans:
        slots = torch.from_numpy(span.slots)
        keys, values = torch.randn(span.keys, heads[1], dims[0]), torch.randn(span.keys, heads[1], dims[1])
        cache.keys[0].flatten(0, 1)[slots] = keys.to(cache.keys[0].dtype)
        cache.values[0].flatten(0, 1)[slots] = values.to(cache.values[0].dtype)
    return batch, torch.randn(len(batch), heads[0], dims[0]).to(dtype), cache.keys[0], cache.values[0]


def agree(batch, q, keys, values, tile=SMALL, **options):
    options = {"scaling": q.shape[2] ** -0.5} | options
    found = TritonAttention(batch, tile)(q, keys, values, **options)
    expected = paged_attention(q, keys, values, batch, **options)
    np.testing.assert_allclose(found.float().numpy(), expected.float().numpy(), atol=TOLERANCE[q.dtype], rtol=1e-2)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1), (20, 1)], ids=str)
def test_ragged_batches(heads, page_size):
    agree(*case(1, heads, page_size=page_size))


@pytest.mark.parametrize("seed", range(6))
def test_windows_soft_caps_and_sinks(seed):
    rng = np.random.default_rng(seed)
    batch, q, keys, values = case(seed)
    options = {"window": int(rng.integers(1, 70))} if seed % 2 else {}
    options |= {"softcap": 2.0} if seed % 3 == 0 else {}
    options |= {"sinks": torch.randn(4)} if seed % 3 < 2 else {}
    agree(batch, q, keys, values, scaling=0.3, **options)


@pytest.mark.parametrize("dims", [(8, 8), (24, 24), (80, 80), (96, 64), (192, 128), (256, 256), (576, 512)], ids=str)
def test_head_sizes(dims):
    agree(*case(2, (3, 1), dims, sessions=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    agree(*case(3, dtype=dtype))


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_pools_with_scales(pool_dtype):
    batch, q, keys, values = case(4, pool_dtype=pool_dtype)
    scaled = TritonAttention(batch, SMALL)(q, keys, values, scaling=0.25, k_scale=0.5, v_scale=3.0)
    expected = paged_attention(q, keys.float() * 0.5, values.float() * 3.0, batch, scaling=0.25)
    np.testing.assert_allclose(scaled.numpy(), expected.numpy(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("window", [None, 20])
def test_a_rows_bits_do_not_depend_on_its_company(window, monkeypatch):
    works = [work for seed in (5, 6) for work in random_works(np.random.default_rng(seed), 4, 1)]
    torch.manual_seed(1)
    pools = torch.randn(2, 200, 4, 2, 16)
    together = build(works, CPU)
    q = torch.randn(len(together), 4, 16)
    found = TritonAttention(together, SMALL)(q, *pools, scaling=0.25, window=window)
    monkeypatch.setattr(triton_attention, "_PARTIAL_BYTES", 1)  # no room: every tile is folded by one program
    assert torch.equal(found, TritonAttention(together, SMALL)(q, *pools, scaling=0.25, window=window))
    monkeypatch.undo()
    for work, span in zip(works, together.spans, strict=True):
        rows = slice(span.first, span.first + span.rows)
        alone = TritonAttention(build([work], CPU), SMALL)(q[rows], *pools, scaling=0.25, window=window)
        assert torch.equal(found[rows], alone)


def test_words_are_tree_masks():
    rng = np.random.default_rng(0)
    drafts = [np.array([rng.integers(-1, i) for i in range(size)], np.int32) for size in (1, 70, 33, 5)]
    words = ancestor_words(drafts, 3).view(np.uint32)
    bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).reshape(len(words), -1).astype(bool)
    first = 0
    for parents in drafts:
        size = len(parents)
        assert (bits[first : first + size, :size] == tree_mask(parents)).all()
        assert not bits[first : first + size, size:].any()
        first += size
    assert ancestor_words([], 1).shape == (0, 1)


def test_rows_of_padding_see_nothing():
    batch, q, keys, values = case(7)
    padded = pad(batch, len(batch) + 21, 16)
    q = torch.cat([q, torch.randn(21, *q.shape[1:])])
    found = TritonAttention(padded, SMALL)(q, keys, values, scaling=0.25)
    assert not found[len(batch) :].any()
    assert torch.equal(found[: len(batch)], TritonAttention(batch, SMALL)(q[: len(batch)], keys, values, scaling=0.25))


def test_partial_results_stay_within_their_room():
    batch, *_ = case(8, sessions=6)
    ragged = Ragged(batch.spans)
    free = ragged.tables(8, None, 16, Load(1000, 10**6), 2)
    assert free.partial_rows > 50
    assert len(free.items) > len(free.tiles)
    for room in (0, 10, 50):
        assert ragged.tables(8, None, 16, Load(1000, room), 2).partial_rows <= room
    cost = free.items[:, 2] - free.items[:, 1]
    assert (np.diff(cost) <= 0).all()


def test_backends_are_refused_by_name(monkeypatch):
    assert choose("auto", CPU) is GroupedAttention
    assert choose("triton", CPU) is TritonAttention
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="--attention-backend triton needs a CUDA device"):
        choose("triton", CPU)
    with pytest.raises(ConfigError, match='"fa9" is not known'):
        choose("fa9", CPU)


def random_hints():
    rng = np.random.default_rng(1)
    return lambda session_id, path: [random_tree(rng, session_id, path, VOCAB, 5)]


def test_an_engine_says_the_same_through_it(tmp_path):
    from services.target.model.load import load

    folder = write_model(tmp_path, num_hidden_layers=1)
    requests = [opening(i, [5 + i, 6, 7, 5 + i, 6], max_tokens=4) for i in range(2)]
    texts = []
    for backend in ("torch_native", "triton"):
        config = TargetConfig(device="cpu", attention_backend=backend, max_total_tokens=512)
        texts.append(run(TargetEngine(load(folder, config), config), requests, random_hints()).new)
    assert texts[0] == texts[1]
