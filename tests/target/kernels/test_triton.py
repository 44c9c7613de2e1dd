"""The CUDA kernel, run by Triton's interpreter on CPU tensors, against its plain twin."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.tree import ROOT, TreeSlice
from services.target.engine.engine import TargetEngine
from services.target.kernels.cpu.attention.paged import NativeAttention
from services.target.kernels.cuda.ragged import _BEGINNING, Load, Ragged, Split, _through, ancestor_words
from services.target.kernels.dispatch import choose
from services.target.kernels.grouped import GroupedAttention
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.kernels.reference import paged_attention
from services.target.step.batch import SessionWork, build, pad
from services.target.step.layout import Layout, tree_mask
from tests.support.target.cuda.compiling import COMPILE
from tests.support.target.cuda.interpreter import need_interpreter
from tests.support.target.cuda.triton_attention import CPU, LONGEST, SMALL, attention_case
from tests.support.target.driving import opening, random_tree, run
from tests.support.target.works import random_works, shuffled_allocator
from tests.support.tiny import VOCAB, write_model

need_interpreter()

from services.target.kernels.cuda import attention as triton_attention  # noqa: E402
from services.target.kernels.cuda import cache as triton_cache  # noqa: E402
from services.target.kernels.cuda import greedy as triton_greedy  # noqa: E402
from services.target.kernels.cuda.attention import TritonAttention  # noqa: E402
from services.target.sampling import sampler  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def agree(batch, q, keys, values, tile=SMALL, **options):
    options = {"scaling": q.shape[2] ** -0.5} | options
    found = TritonAttention(batch, tile)(q, keys, values, **options)
    expected = paged_attention(q, keys, values, batch, **options)
    np.testing.assert_allclose(found.float().numpy(), expected.float().numpy(), atol=TOLERANCE[q.dtype], rtol=1e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("heads", "page_size"), [((4, 4), 1), ((6, 2), 16), ((7, 1), 16), ((20, 1), 1)], ids=str)
def test_ragged_batches(heads, page_size):
    agree(*attention_case(1, heads, page_size=page_size, sessions=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_windows_soft_caps_and_sinks(seed):
    rng = np.random.default_rng(seed)
    batch, q, keys, values = attention_case(seed, sessions=2)
    options = {"window": int(rng.integers(1, 70))} if seed % 2 else {}
    options |= {"softcap": 2.0} if seed % 3 == 0 else {}
    options |= {"sinks": torch.randn(4)} if seed % 3 < 2 else {}
    agree(batch, q, keys, values, scaling=0.3, **options)


@pytest.mark.parametrize("dims", [(8, 8), (24, 24), (80, 80), (96, 64), (192, 128), (256, 256), (576, 512)], ids=str)
def test_head_sizes(dims):
    agree(*attention_case(5, (3, 1), dims, sessions=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    agree(*attention_case(3, dtype=dtype, sessions=2))


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_pools_with_scales(pool_dtype):
    batch, q, keys, values = attention_case(7, pool_dtype=pool_dtype)
    scaled = TritonAttention(batch, SMALL)(q, keys, values, scaling=0.25, k_scale=0.5, v_scale=3.0)
    expected = paged_attention(q, keys.float() * 0.5, values.float() * 3.0, batch, scaling=0.25)
    np.testing.assert_allclose(scaled.numpy(), expected.numpy(), atol=1e-4, rtol=1e-3)


_GUARDED = """
import ctypes, mmap
import numpy, torch
from tests.support.target.cuda.triton_attention import SMALL, attention_case
from services.target.kernels.cuda.attention import TritonAttention
batch, q, keys, values = attention_case(3)
attention = TritonAttention(batch, SMALL)
expected = attention(q, keys, values, scaling=0.25)
memory, words = mmap.mmap(-1, 2 * mmap.PAGESIZE), attention._words
behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + mmap.PAGESIZE
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
last = numpy.frombuffer(memory, numpy.int32, words.numel(), mmap.PAGESIZE - words.nbytes)
attention._words = torch.from_numpy(last).view(words.shape).copy_(words)
assert torch.equal(attention(q, keys, values, scaling=0.25), expected)
"""


@pytest.mark.long
def test_no_mask_bits_are_read_past_the_last_node():
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", _GUARDED], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr or "memory was read that is not there"


@pytest.mark.parametrize("window", [None, 20])
def test_a_rows_bits_do_not_depend_on_the_batch(window, monkeypatch):
    works = [work for seed in (5, 6) for work in random_works(np.random.default_rng(seed), 4, 1, LONGEST)]
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
    words = ancestor_words(np.concatenate(drafts), np.array([len(draft) for draft in drafts]), 3).view(np.uint32)
    bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).reshape(len(words), -1).astype(bool)
    first = 0
    for parents in drafts:
        size = len(parents)
        assert (bits[first : first + size, :size] == tree_mask(parents)).all()
        assert not bits[first : first + size, size:].any()
        first += size
    assert ancestor_words(np.zeros(0, np.int32), np.zeros(3, np.int64), 1).shape == (0, 1)


def test_rows_of_padding_see_nothing():
    batch, q, keys, values = attention_case(7)
    padded = pad(batch, len(batch) + 21)
    q = torch.cat([q, torch.randn(21, *q.shape[1:])])
    found = TritonAttention(padded, SMALL)(q, keys, values, scaling=0.25)
    assert not found[len(batch) :].any()
    assert torch.equal(found[: len(batch)], TritonAttention(batch, SMALL)(q[: len(batch)], keys, values, scaling=0.25))


def test_partial_results_stay_within_their_room():
    batch, *_ = attention_case(8, sessions=6)
    ragged = Ragged(batch.layout, batch.rows.positions)
    free = ragged.tables(8, None, Split(16, 16), Load(1000, 10**6), 2)
    assert free.partial_rows > 50
    assert len(free.items) > len(free.tiles)
    for room in (0, 10, 50):
        assert ragged.tables(8, None, Split(16, 16), Load(1000, room), 2).partial_rows <= room
    cost = free.items[:, 2] - free.items[:, 1]
    assert (np.diff(cost) <= 0).all()


@pytest.mark.parametrize(
    ("sessions", "keys", "expected"),
    [
        (1, 1024, 128),
        (1, 8192, 256),
        (1, 32768, 1024),
        (12, 1024, 512),
        (16, 8192, 4096),
        (40, 8192, 2048),
        (1, 8208, 256),  # a few keys more than a power of two do not leave half of the programs idle
        (4, 1040, 256),
        (16, 1040, 640),
        (3, 0, 128),
    ],
)
def test_splits_are_as_long_as_leaves_no_program_idle(sessions, keys, expected):
    load = Load(264, 10**6)  # an H200, 8 heads
    one = np.ones(sessions, np.int64)
    assert Split(128, 4096).under(load, np.full(sessions, keys), one, 8) == expected
    assert Split(256, 256).under(load, np.full(sessions, keys), one, 8) == 256


@pytest.mark.parametrize(("sessions", "context"), [(1, 1030), (4, 8200), (16, 8200), (16, 1030), (40, 5000), (64, 900)])
def test_the_work_is_laid_out_as_it_was_planned(sessions, context):
    """Each program takes every so-manyeth item; the one that takes the costliest of each round is the last."""
    load, heads = Load(264, 10**6), 8
    one, pages = np.ones(sessions, np.int64), -(-context // 16)
    layout = Layout(
        16 * np.arange(sessions + 1), (context - 16) * one, one, 15 * one, pages * np.arange(sessions),
        np.ones(pages * sessions, np.int32), np.tile(np.arange(-1, 14, dtype=np.int32), sessions), 16,
    )  # fmt: skip
    positions = np.tile(np.arange(context - 16, context), sessions)
    tables = Ragged(layout, positions).tables(16, None, Split(128, 4096), load, heads)
    keys = int(tables.tiles[0, -1])
    begin, end = tables.items[:, 1] * keys, np.minimum(tables.items[:, 2] * keys, context)
    blocks = np.repeat(-(-(end - begin) // 128), heads)
    last = max(int(blocks[program :: load.programs].sum()) for program in range(min(load.programs, len(blocks))))
    counts = np.full(sessions, -(-context // 128))
    assert last == _through(counts, keys // 128, load.programs, heads, 0.0)


def test_splits_are_longer_where_partial_results_cost_much_or_have_no_room():
    prompt, rows = np.arange(1, 129) * 16, np.full(128, 16)
    assert Split(128, 2048).under(Load(264, 10**6), prompt, rows, 8) == 2048  # whole tiles
    verified, rows = np.full(16, 32784), np.full(16, 16)
    assert Split(128, 2048).under(Load(264, 10**6), verified, rows, 8) == 2048
    assert Split(128, 2048).under(Load(264, 16 * 16 * 17 - 1), verified, rows, 8) == 4096
    assert Split(128, 2048).under(Load(264, 0), verified, rows, 8) >= 32784


def test_no_size_of_splits_lets_programs_be_through_much_sooner():
    rng = np.random.default_rng(0)
    for _ in range(200):
        keys = rng.integers(0, 20_000, rng.integers(1, 60))
        programs, heads = int(rng.integers(1, 300)), int(rng.integers(1, 9))

        def through(size, blocks=-(-keys // 128), programs=programs, heads=heads):
            parts = [part for count in blocks.tolist() for part in [size] * (count // size) + [count % size]]
            costs = sorted((part + _BEGINNING / 128 for part in parts if part for _ in range(heads)), reverse=True)
            return sum(costs[::programs])

        found = Split(128, 4096).under(Load(programs, 10**6), keys, np.ones(len(keys), np.int64), heads)
        assert found % 128 == 0
        assert 128 <= found <= 4096
        assert through(found // 128) <= 1.1 * min(map(through, range(1, 33)))


@pytest.mark.parametrize("least", [16, 32, 64])
def test_splits_that_follow_the_load_change_nothing_but_rounding(least):
    agree(*attention_case(11, sessions=2), tile=replace(SMALL, split=Split(least, 64)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("vocab", [1, 40, 2048 * 3, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_likeliest_token_is_the_first_of_equals(vocab, dtype):
    torch.manual_seed(vocab)
    logits = torch.randint(-5, 5, (6, 2 * vocab)).to(dtype)[:, :vocab]
    logits[1] = 1.0
    logits[2, vocab // 2] = torch.nan
    logits[3, vocab // 3] = torch.inf
    logits[4] = -torch.inf
    best, tokens = sampler.likeliest(logits, 1)
    assert torch.equal(triton_greedy.greedy(logits), torch.where(best.isfinite(), tokens, -1))


def test_rows_are_written_where_they_belong_and_never_into_the_null_page():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 5, 20).transpose(0, 1)[:, :, :12], torch.randn(5, 2, 8)
    pools = [torch.zeros(4, 2, 2, 12, dtype=torch.float16), torch.zeros(4, 2, 2, 8)]
    slots = torch.tensor([7, 0, 2, 1, 4])
    triton_cache.write(slots, keys, values, *pools)
    for pool, rows in zip(pools, (keys, values), strict=True):
        assert not pool[0].any()
        assert torch.equal(pool.flatten(0, 1)[[7, 2, 4]], rows[[0, 2, 4]].to(pool.dtype))
        assert not pool.flatten(0, 1)[[3, 5, 6]].any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_numbers_too_large_for_a_pool_saturate(dtype):
    rows = torch.tensor([1e6, -1e6, 3.0, 0.0]).reshape(1, 2, 2)
    pools = [torch.zeros(2, 1, 2, 2).to(dtype) for _ in range(2)]
    triton_cache.write(torch.tensor([1]), rows, rows, *pools)
    limit = torch.finfo(dtype).max
    for pool in pools:
        assert pool.float()[1].flatten().tolist() == [limit, -limit, 3.0, 0.0]


def test_moves_in_all_pools():
    pools = [torch.randn(4, 2, 3, 5), torch.randn(4, 2, 700).unsqueeze(3).to(torch.float16)]
    before = [pool.flatten(0, 1).clone() for pool in pools]
    sources, destinations = torch.tensor([3, 4, 7]), torch.tensor([2, 3, 4])
    triton_cache.Mover(pools).move(sources, destinations)
    for pool, rows in zip(pools, before, strict=True):
        expected = rows.clone()
        expected[destinations] = rows[sources]
        assert torch.equal(pool.flatten(0, 1), expected)


def test_paths_of_sessions_move_in_all_pools():
    pools = [torch.randn(6, 2, 3, 5), torch.randn(6, 2, 700).unsqueeze(3).to(torch.float16)]
    twin = KVCache([LayerShape(3, 5, 5)], 5, 2, torch.float32, CPU)
    twin.keys[0].copy_(pools[0])
    before = pools[1].flatten(0, 1).clone()
    whole = torch.zeros(2, 7, dtype=torch.int64)  # as Trees.moves hands them out: a part of something longer
    moves = whole[:, :6].unflatten(1, (2, 3))
    moves[:, 0] = torch.tensor([[3, 4, 7], [2, 3, 4]])
    moves[:, 1, :2] = torch.tensor([[8, 11], [8, 9]])
    triton_cache.Mover(pools).move_paths(moves)
    twin.move_paths(moves)
    assert torch.equal(pools[0], twin.keys[0])
    expected = before.clone()
    expected[[2, 3, 4, 9]] = before[[3, 4, 7, 11]]
    assert torch.equal(pools[1].flatten(0, 1), expected)


def test_kernels_compile_for_a_gpu_without_one(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    shared = {name: int(size) for name, _, size in map(str.split, result.stdout.splitlines())}
    assert list(shared) == [
        "attend", "fold", "write_rows", "move_rows", "move_paths", "_product", "_sum", "small_batch_linear",
        "small_batch_rotary", "_add_norm", "_rotate_and_store", "_gated", "part_best", "row_best", "choose",
    ]  # fmt: skip
    assert max(shared.values()) < 227 << 10


def test_backends_are_refused_by_name(monkeypatch):
    assert choose("torch_native", CPU) is GroupedAttention
    assert choose("auto", CPU) in (GroupedAttention, NativeAttention)
    with pytest.raises(ConfigError, match="--attention-backend native is for CPUs, not cuda"):
        choose("native", torch.device("cuda"))
    assert choose("triton", CPU) is TritonAttention
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="--attention-backend triton needs a CUDA device"):
        choose("triton", CPU)
    with pytest.raises(ConfigError, match='"fa9" is not known'):
        choose("fa9", CPU)


def random_hints():
    rng = np.random.default_rng(1)
    return lambda session_id, path: [random_tree(rng, session_id, path, VOCAB, 5)]


def test_an_engine_generates_the_same_text_with_it(tmp_path):
    from services.target.model.loading.load import load

    folder = write_model(tmp_path, num_hidden_layers=1)
    requests = [opening(i, [5 + i, 6, 7, 5 + i, 6], max_tokens=4) for i in range(2)]
    texts = []
    for backend in ("torch_native", "triton"):
        config = TargetConfig(device="cpu", attention_backend=backend, max_total_tokens=512)
        texts.append(run(TargetEngine(load(folder, config), config), requests, random_hints()).new)
    assert texts[0] == texts[1]


def test_a_branchs_keys_are_added_in_the_order_of_plain_decoding():
    """With `ordered`, every node has the bits of a plain row behind its path, wherever it stands in the tree."""
    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    parents = np.array([ROOT, 0, ROOT, 2, 1, 3, 3, 6, 4, 0, 7], np.int32)
    depths = np.array([1, 2, 1, 2, 3, 3, 3, 4, 4, 2, 5], np.int32)
    draft = TreeSlice(rng.integers(0, VOCAB, 11).astype(np.uint32), parents, depths, np.zeros(11, np.float32))
    committed = 29  # so that paths cross from one split into the next
    allocator = shuffled_allocator(rng, 40, 4)
    session = Session(opening(1, rng.integers(0, VOCAB, committed).tolist()), PrefixCache(allocator))
    session.table.reserve(committed + 11)
    batch = build([SessionWork(Chunk(session, committed - 1, committed), draft)], CPU)
    pools, q = torch.randn(2, 41, 4, 2, 16), torch.randn(len(batch), 4, 16)
    for options in ({}, {"window": 7, "sinks": torch.randn(4)}):
        found = TritonAttention(batch, SMALL, ordered=True)(q, *pools, scaling=0.25, **options)
        expected = paged_attention(q, *pools, batch, scaling=0.25, **options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        slots = session.table.slots(0, committed + 11)
        for node, depth in enumerate(depths):
            path = [node]
            while parents[path[-1]] != ROOT:
                path.append(parents[path[-1]])
            plain = pools.clone().flatten(1, 2)  # keys and values of the path where plain decoding would put them
            plain[:, slots[committed : committed + depth]] = pools.flatten(1, 2)[
                :, slots[committed + np.array(path[::-1])]
            ]
            alone = Session(opening(1, rng.integers(0, VOCAB, committed + depth).tolist()), PrefixCache(allocator))
            alone.table._extend(session.table.pages.tolist())
            row = build([SessionWork(Chunk(alone, committed + depth - 1, committed + depth))], CPU)
            decoded = TritonAttention(row, SMALL)(
                q[node + 1 :][:1], *plain.unflatten(1, (41, 4)), scaling=0.25, **options
            )
            assert torch.equal(found[node + 1], decoded[0]), node
