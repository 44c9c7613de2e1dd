"""The CUDA kernels on shapes of real models, against their plain twin. Run by `make gpu`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.acceptance import accepted_path
from outrider.speculation.tree import EMPTY_SLICE
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.kernels.reference import paged_attention
from services.target.sampling.compaction import Moves, lay_out
from services.target.step.batch import SessionWork, build, pad
from services.target.step.layout import Extent
from services.target.step.upload import UploadBatch
from tests.support.target.driving import opening
from tests.support.target.works import random_case, random_slice

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda")
# Largest error of a result against the twin's, whose products and sums are in float32.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# (length, first token of the chunk, nodes): plain rows, trees, a prompt from its start, chunks, at short and long ends
ROWS = [(1, 0, 0), (700, 699, 0), (4097, 4096, 0), (513, 512, 15), (3000, 2999, 40), (300, 0, 0), (2048, 1800, 7)]


def case(heads, dims, dtype, pool_dtype=None, rows=ROWS, page_size=16):
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    allocator = PageAllocator(sum(length + nodes for length, _, nodes in rows) // page_size + 2 * len(rows), page_size)
    rng.shuffle(allocator._free)
    works = []
    for i, (length, start, nodes) in enumerate(rows):
        session = Session(opening(i, rng.integers(0, 50, length).tolist()), PrefixCache(allocator))
        session.table.reserve(length + nodes)
        works.append(SessionWork(Chunk(session, start, length), random_slice(rng, nodes) if nodes else EMPTY_SLICE))
    batch = build(works, CUDA)
    cache = KVCache([LayerShape(heads[1], *dims)], allocator.total_pages, page_size, pool_dtype or dtype, CUDA)
    for pool in (cache.keys[0], cache.values[0]):
        pool.copy_(torch.full(pool.shape, torch.nan))  # rows that were not written must not be read
        pool[0] = 0.0
    for span in batch.spans:
        keys, values = torch.randn(span.keys, heads[1], dims[0]), torch.randn(span.keys, heads[1], dims[1])
        cache.write(0, torch.from_numpy(span.slots).to(CUDA), keys.to(CUDA, dtype), values.to(CUDA, dtype))
    return works, batch, torch.randn(len(batch), heads[0], dims[0]).to(CUDA, dtype), cache


def attention(batch, *, ordered=False):
    from services.target.kernels.cuda.attention import TritonAttention

    return TritonAttention(batch, ordered=ordered)


def agree(heads, dims, dtype, pool_dtype=None, rows=ROWS, **options):
    _, batch, q, cache = case(heads, dims, dtype, pool_dtype, rows)
    assert (batch.layout.extent < Extent.LONG) == (rows is not ROWS)
    pools = cache.keys[0], cache.values[0]
    options = {"scaling": dims[0] ** -0.5} | options
    found = attention(batch)(q, *pools, **options)
    expected = paged_attention(q.float(), *pools, batch, **options)
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize(
    ("heads", "dims"),
    [((32, 8), (128, 128)), ((28, 4), (128, 128)), ((8, 8), (64, 64)), ((16, 16), (192, 128)), ((128, 1), (576, 512)),
     ((8, 4), (256, 256)), ((32, 32), (80, 80)), ((12, 4), (96, 96)), ((64, 8), (64, 64))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_shapes(heads, dims, dtype):
    agree(heads, dims, dtype)


@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (16, 16), (64, 8)], ids=str)
@pytest.mark.parametrize("extra", [{}, {"softcap": 30.0, "window": 300}], ids=str)
def test_short_spans_have_tiles_of_their_own(heads, extra):
    rows = [(1, 0, 0), (700, 699, 0), (4097, 4096, 0), (513, 512, 3), (9000, 8999, 2), (2049, 2045, 0), (300, 299, 1)]
    agree(heads, (128, 128), torch.bfloat16, rows=rows, **extra)


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_pools(pool_dtype):
    agree((32, 8), (128, 128), torch.bfloat16, pool_dtype)


@pytest.mark.parametrize("window", [None, 1, 128, 1000])
@pytest.mark.parametrize("extra", [{}, {"softcap": 30.0}, {"sinks": True}], ids=str)
def test_windows_soft_caps_and_sinks(window, extra):
    options = {"sinks": torch.randn(32, device=CUDA)} if "sinks" in extra else extra
    agree((32, 8), (128, 128), torch.bfloat16, window=window, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_rows_bits_do_not_depend_on_the_batch(dtype):
    works, together, q, cache = case((32, 8), (128, 128), dtype)
    found = attention(together, ordered=True)(q, cache.keys[0], cache.values[0], scaling=0.1)
    for work, span in zip(works, together.spans, strict=True):
        rows = slice(span.first, span.first + span.rows)
        alone = attention(build([work], CUDA), ordered=True)(q[rows], cache.keys[0], cache.values[0], scaling=0.1)
        assert torch.equal(found[rows], alone)
    padded = pad(together, len(together) + 21)
    more = torch.cat([q, torch.randn(21, *q.shape[1:], device=CUDA, dtype=dtype)])
    result = attention(padded, ordered=True)(more, cache.keys[0], cache.values[0], scaling=0.1)
    assert torch.equal(result[: len(together)], found)
    assert not result[len(together) :].any()


def test_a_plain_rows_bits_are_those_of_the_same_row_among_nodes():
    """A chain of nodes lies where plain decoding would have put its tokens, so the same keys are added up alike."""
    length, nodes = 1500, 15
    parents = np.arange(-1, nodes - 1, dtype=np.int32)
    works, _, q, cache = case((32, 8), (128, 128), torch.bfloat16, rows=[(length, length - 1, nodes)])
    chain = random_slice(np.random.default_rng(0), nodes)
    chain = type(chain)(chain.tokens, parents, parents + 2, chain.path_scores)
    verified = build([SessionWork(works[0].chunk, chain)], CUDA)
    found = attention(verified, ordered=True)(q, cache.keys[0], cache.values[0], scaling=0.1)
    session = works[0].chunk.session
    session.append(chain.tokens)
    for row in range(nodes + 1):
        plain = build([SessionWork(Chunk(session, length - 1 + row, length + row))], CUDA)
        alone = attention(plain, ordered=True)(q[row : row + 1], cache.keys[0], cache.values[0], scaling=0.1)
        assert torch.equal(alone[0], found[row])


def test_rows_are_written_and_moved():
    shapes = [LayerShape(8, 128, 128), LayerShape(1, 576, 512), LayerShape(3, 80, 80)]
    cache = KVCache(shapes, 40, 16, torch.bfloat16, CUDA)
    slots = torch.randperm(600)[:33].to(CUDA) + 16
    slots[5] = 3  # padding's, in NULL_PAGE
    rows = []
    for layer, shape in enumerate(shapes):
        keys = torch.randn(shape.kv_heads, 33, shape.key_dim, device=CUDA).bfloat16().transpose(0, 1)
        values = torch.randn(33, shape.kv_heads, shape.value_dim, device=CUDA).bfloat16()
        cache.write(layer, slots, keys, values)
        rows.append((keys, values))
    for (keys, values), k_pool, v_pool in zip(rows, cache.keys, cache.values, strict=True):
        for pool, written in ((k_pool, keys), (v_pool, values)):
            assert not pool[0].any()
            mine = [i for i in range(33) if i != 5]
            assert torch.equal(pool.flatten(0, 1)[slots[mine]], written[mine])
    before = [pool.flatten(0, 1).clone() for pool in (*cache.keys, *cache.values)]
    sources, destinations = torch.tensor([33, 34, 50], device=CUDA), torch.tensor([32, 33, 34], device=CUDA)
    cache.move(sources, destinations)
    for pool, old in zip((*cache.keys, *cache.values), before, strict=True):
        expected = old.clone()
        expected[destinations] = old[sources]
        # As integers, because rows that were not written may be NaN.
        assert torch.equal(pool.flatten(0, 1).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_accepted_paths_move_as_the_host_would_move_them(dtype):
    """Trees walked on the device, and their rows moved in all pools; against the walk and the moves of the host."""
    rng = np.random.default_rng(1)
    shapes = [LayerShape(8, 128, 128), LayerShape(1, 576, 512, shared=True), LayerShape(3, 80, 64)]
    for sessions in (1, 3, 40):
        works, drawn, allocator = random_case(rng, sessions, 15)
        works[0] = replace(works[0], draft=random_slice(rng, 1)) if not len(works[0].draft) else works[0]
        drawn[0] = np.resize(drawn[0], len(works[0].draft) + 1)
        works[0].chunk.session.table.reserve(works[0].chunk.stop + len(works[0].draft))
        moves, host = [], Moves()
        for device in (torch.device("cpu"), CUDA):
            batch, parcel = build(works, device), UploadBatch()
            trees = lay_out(works, batch, parcel)
            parcel.send(device)
            moves.append(trees().moves(torch.from_numpy(np.concatenate(drawn)).to(device)))
        assert torch.equal(moves[0], moves[1].cpu())
        for work, own in zip(works, drawn, strict=True):
            host.add(work.chunk.session, accepted_path(work.draft, own)[0])
        caches = [KVCache(shapes, allocator.total_pages, allocator.page_size, dtype, CUDA) for _ in range(2)]
        for mine, its in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
            mine.copy_(torch.randn(mine.shape, device=CUDA))
            its.copy_(mine)
        host.make(caches[0], CUDA)
        caches[1].move_paths(moves[1])
        for mine, its in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
            assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))
