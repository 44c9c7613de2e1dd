"""Ragged paged attention with tree masks, against dense attention in float64 that knows nothing of pages."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.paging.allocator import NULL_PAGE, PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.tree import TreeSlice
from services.target.kernels.cpu import library
from services.target.kernels.cpu.attention.paged import NativeAttention
from services.target.kernels.dispatch import plan
from services.target.kernels.grouped import GroupedAttention
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.kernels.reference import paged_attention
from services.target.step.batch import SessionWork, build
from services.target.step.layout import tree_mask
from tests.support.target.driving import opening
from tests.support.target.works import allocator_of, random_slice, random_works

pytestmark = pytest.mark.threads

CPU = torch.device("cpu")


def path_rows(span):
    """For each row of a span the key indices that it sees: its own path, and nothing else."""
    for row in range(span.rows):
        if row < span.committed:
            yield list(range(span.start + row + 1))
        else:
            node = row - span.committed
            own = span.start + span.committed
            yield list(range(own)) + [own + int(i) for i in np.flatnonzero(span.tree_mask[node])]


def dense(q, keys, values, span, scaling, window, softcap, sinks):
    """keys, values: [keys, kv_heads, D] of one session, in order. Row by row, head by head, in float64."""
    out = np.zeros((span.rows, q.shape[1], values.shape[2]))
    position = {**{i: i for i in range(span.start)}, **{span.start + r: p for r, p in enumerate(span.positions)}}
    group = q.shape[1] // keys.shape[1]
    for row, seen in enumerate(path_rows(span)):
        if window is not None:
            seen = [key for key in seen if position[key] > span.positions[row] - window]
        for head in range(q.shape[1]):
            scores = keys[seen, head // group] @ q[span.first + row, head] * scaling
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum() + (0.0 if sinks is None else math.exp(sinks[head]))
            out[row, head] = (weights / total) @ values[seen, head // group]
    return out


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from([1, 16, 64]),
    heads=st.sampled_from([(4, 4), (6, 2), (4, 1)]),
    window=st.sampled_from([None, 1, 7, 64]),
    extra=st.sampled_from([None, "softcap", "sinks"]),
    dims=st.sampled_from([(8, 8), (8, 12)]),
)
def test_kernels_agree_with_dense_attention(seed, page_size, heads, window, extra, dims):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    works = random_works(rng, page_size, int(rng.integers(1, 7)))
    batch = build(works, CPU)
    allocator = allocator_of(works)
    cache = KVCache([LayerShape(heads[1], *dims)], allocator.total_pages, page_size, torch.float32, CPU)
    q = torch.randn(len(batch), heads[0], dims[0])
    history = []  # [keys, kv_heads, D] of each session, as if it had been written row by row
    for span in batch.spans:
        rows = torch.randn(span.kv_tokens, heads[1], dims[0]), torch.randn(span.kv_tokens, heads[1], dims[1])
        cache.write(0, torch.from_numpy(span.slots), *rows)
        history.append([row.double().numpy() for row in rows])
    options = {"scaling": 0.3, "window": window}
    options |= {"softcap": 2.0} if extra == "softcap" else {}
    options |= {"sinks": torch.randn(heads[0])} if extra == "sinks" else {}
    sinks = options.get("sinks")
    expected = np.concatenate(
        [
            dense(
                q.double().numpy(), *kv, span, 0.3, window, options.get("softcap"),
                None if sinks is None else sinks.tolist(),
            )
            for span, kv in zip(batch.spans, history, strict=True)
        ]
    )  # fmt: skip
    twin = paged_attention(q, cache.keys[0], cache.values[0], batch, **options)
    fused = plan(batch)(q, cache.keys[0], cache.values[0], **options)
    np.testing.assert_allclose(twin.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(fused.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("shape", ["trees", "chains"])
@pytest.mark.parametrize("kernel", ["plain", "grouped", "native"])
def test_a_broken_node_breaks_those_below_it_and_no_other(kernel, shape, window, dtype, multiplied_by):
    """A draft may name tokens that the model makes no numbers of."""
    if kernel == "native" and not library.available():
        pytest.skip("the CPU kernels do not compile on this machine")
    kernel = {
        "plain": lambda batch: partial(paged_attention, batch=batch), "grouped": GroupedAttention,
        "native": NativeAttention,
    }[kernel]  # fmt: skip
    rng = np.random.default_rng(1)
    works = random_works(rng, 16, 12, longest=300)
    if shape == "chains":
        for work in works:
            work.draft.parents[:] = np.arange(-1, len(work.draft) - 1)
            work.draft.depths[:] = np.arange(1, len(work.draft) + 1)
    batch = build(works, CPU)
    pages = allocator_of(works).total_pages
    cache = KVCache([LayerShape(2, 16, 16)], pages, 16, dtype, CPU)
    pools = cache.keys[0], cache.values[0]
    for pool in pools:
        pool.copy_(torch.randn(pool.shape))
    q = torch.randn(len(batch), 4, 16).to(dtype)
    expected = kernel(batch)(q, *pools, scaling=0.2, window=window)
    broken = np.zeros(len(batch), bool)
    for span in batch.spans:
        if span.nodes:
            node = int(rng.integers(span.nodes))
            below = span.tree_mask[:, node]
            if window is not None:
                positions = span.positions[span.committed :]
                below = below & (positions < positions[node] + window)
            broken[span.first + span.committed : span.first + span.rows] = below
            for pool in pools:
                pool.flatten(0, 1)[int(span.slots[span.start + span.committed + node])] = torch.nan
    for pool in pools:
        pool[NULL_PAGE] = torch.nan
    found = kernel(batch)(q, *pools, scaling=0.2, window=window)
    assert broken.any()
    assert torch.equal(found[~broken], expected[~broken])
    assert found[broken].isnan().flatten(1).any(1).all()


@pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")
@pytest.mark.parametrize(("heads", "dims"), [
    ((6, 2), (20, 12)), ((4, 1), (7, 5)), ((8, 4), (128, 128)), ((40, 1), (8, 8)), ((96, 2), (16, 16)),
    ((70, 2), (48, 80)), ((8, 1), (576, 512)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_agrees_with_its_twin(heads, dims, dtype, multiplied_by):
    """Also for many heads a key, long contexts, more nodes than fit side by side, and pages with leftovers."""
    rng = np.random.default_rng(sum(heads) * sum(dims))
    for page_size, longest, nodes in ((1, 150, 20), (16, 700, 90), (5, 10, 150)):
        batch = build(random_works(rng, page_size, 3, longest, nodes), CPU)
        pages = 1 + max(int(span.pages.max()) for span in batch.spans)
        cache = KVCache([LayerShape(heads[1], *dims)], pages, page_size, dtype, CPU)
        for pool in (cache.keys[0], cache.values[0]):
            pool.fill_(torch.nan)
        for span in batch.spans:
            keys, values = (
                torch.randn(span.kv_tokens, heads[1], dims[0]),
                torch.randn(span.kv_tokens, heads[1], dims[1]),
            )
            cache.write(0, torch.from_numpy(span.slots), keys, values)
        q = torch.randn(len(batch), heads[0], dims[0]).to(dtype)
        options = {"scaling": dims[0] ** -0.5, "window": rng.choice([None, 1, 7, 300])}
        options |= {"sinks": torch.randn(heads[0])} if rng.random() < 0.5 else {"softcap": 2.0}
        expected = paged_attention(q, cache.keys[0], cache.values[0], batch, **options)
        found = NativeAttention(batch)(q, cache.keys[0], cache.values[0], **options)
        error = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=error, atol=error)


@pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2), (8, 2), (10, 2)])
@pytest.mark.parametrize("dims", [(64, 64), (20, 12), (80, 48)])
@pytest.mark.parametrize("formats", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn),
])  # fmt: skip
def test_a_row_has_the_same_bits_alone_and_in_a_batch(heads, dims, formats, multiplied_by):
    """Keys of a single row are not laid out for the arithmetic; those of several rows, and of trees, are."""
    dtype, stored = formats
    rng = np.random.default_rng(0)
    allocator = PageAllocator(64, 16)
    cache = KVCache([LayerShape(heads[1], *dims)], 64, 16, stored, CPU)
    for pool, dim in zip((cache.keys[0], cache.values[0]), dims, strict=True):
        pool.copy_(torch.randn(65, 16, heads[1], dim).to(dtype).to(stored))
    for length, window in itertools.product((1, 31, 128, 129, 300, 385), (None, 100)):
        session = Session(opening(1, rng.integers(0, 50, length).tolist()), PrefixCache(allocator))
        session.table.reserve(length + 8)
        first = max(0, length - 5)
        q = torch.randn(length - first, heads[0], dims[0]).to(dtype)
        rows = {
            "alone": (length - 1, 0, q[-1:]), "in a chunk": (first, 0, q),
            "with a tree": (length - 1, 8, torch.cat([q[-1:], torch.randn(8, heads[0], dims[0]).to(dtype)])),
        }  # fmt: skip
        found = {}
        for name, (start, nodes, queries) in rows.items():
            batch = build([SessionWork(Chunk(session, start, length), random_slice(rng, nodes))], CPU)
            results = NativeAttention(batch)(
                queries, cache.keys[0], cache.values[0], scaling=dims[0] ** -0.5, window=window
            )
            found[name] = results[0 if nodes else -1]
        assert all(torch.equal(found["alone"], other) for other in found.values()), length
        session.table.release()


def test_a_batch_lays_out_rows_positions_slots_and_samples():
    allocator = PageAllocator(20, 4)
    first = Session(opening(1, [10, 11, 12, 13, 14]), PrefixCache(allocator))  # its chunk ends before its prompt does
    second = Session(opening(2, [20, 21, 22]), PrefixCache(allocator))
    first.table.reserve(5)
    second.table.reserve(6)
    parents, depths = np.array([-1, 0, -1], np.int32), np.array([1, 2, 1], np.int32)
    draft = TreeSlice(np.array([7, 8, 9], np.uint32), parents, depths, np.zeros(3, np.float32))
    batch = build([SessionWork(Chunk(first, 1, 4)), SessionWork(Chunk(second, 2, 3), draft)], CPU)
    assert batch.ids.tolist() == [11, 12, 13, 22, 7, 8, 9]
    assert batch.positions.tolist() == [1, 2, 3, 2, 3, 4, 3]
    slots = [*first.table.slots(1, 4), *second.table.slots(2, 6)]
    assert batch.slots.tolist() == slots
    assert batch.sampled.tolist() == [3, 4, 5, 6]


def test_tree_mask_is_ancestry():
    assert tree_mask(np.array([-1, 0, 1, 0, -1])).astype(int).tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1],
    ]  # fmt: skip


def test_move_reads_everything_before_it_writes():
    cache = KVCache([LayerShape(1, 1, 1), LayerShape(2, 1, 3)], 4, 2, torch.float32, CPU)
    slots = torch.arange(2, 10)
    for layer, shape in enumerate([(1, 1), (2, 3)]):
        keys = torch.arange(2.0, 10).reshape(8, 1, 1).expand(8, shape[0], 1)
        cache.write(layer, slots, keys, keys.expand(8, shape[0], shape[1]).contiguous())
    cache.move(torch.tensor([3, 4, 9]), torch.tensor([2, 3, 4]))
    for pool in (*cache.keys, *cache.values):
        assert pool.flatten(0, 1)[2:6].reshape(4, -1)[:, 0].tolist() == [3.0, 4.0, 9.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_compiled_moves_are_the_plain_ones(dtype):
    library = pytest.importorskip("services.target.kernels.cpu.library")
    if not library.available():
        pytest.skip("there are no compiled kernels")
    rng = np.random.default_rng(0)
    shapes = [LayerShape(2, 3, 5), LayerShape(1, 7, 2), LayerShape(1, 6, 4, shared=True)]
    for _ in range(20):
        compiled, plain = (KVCache(shapes, 8, 4, dtype, CPU) for _ in range(2))
        slots = torch.arange(36)
        for layer, shape in enumerate(shapes):
            keys = torch.randn(36, shape.kv_heads, shape.key_dim)
            values = torch.randn(36, shape.kv_heads, shape.value_dim)
            for cache in (compiled, plain):
                cache.write(layer, slots, keys, keys[..., : shape.value_dim] if shape.shared else values)
        assert compiled._mover is not None
        plain._mover = None
        places = rng.permutation(np.arange(4, 36))
        path = np.sort(rng.choice(20, rng.integers(1, 9), replace=False))
        sources, destinations = places[path], places[: len(path)]
        for cache in (compiled, plain):
            cache.move(torch.from_numpy(sources), torch.from_numpy(destinations))
        for mine, true in zip((*compiled.keys, *compiled.values), (*plain.keys, *plain.values), strict=True):
            assert torch.equal(mine.view(torch.uint8), true.view(torch.uint8))
