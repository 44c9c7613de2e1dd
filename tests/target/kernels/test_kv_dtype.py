"""Narrow KV pools: what they hold, how kernels read it, and that a text depends on the format alone."""

import numpy as np
import pytest
import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.kernels.dispatch import plan
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape, gather, pick_cache_dtype, stored, token_bytes
from services.target.kernels.reference import paged_attention
from services.target.model.loading.load import load
from services.target.speculation.modes.mode import DRAFT_MODES
from services.target.step.batch import build
from tests.support.target.driving import GREEDY, chain, opening, random_tree, run
from tests.support.target.works import allocator_of, random_works
from tests.support.tiny import VOCAB, write_model

CPU = torch.device("cpu")
EIGHT_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
NARROW = {"bf16": torch.bfloat16} | EIGHT_BITS


@pytest.mark.parametrize("dtype", EIGHT_BITS.values(), ids=EIGHT_BITS)
def test_numbers_are_rounded_to_the_nearest_and_saturate(dtype):
    cells = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = cells[cells.isfinite()].double().numpy()
    values = torch.cat([torch.randn(2000) * 3, torch.tensor([0.0, 1e9, -1e9, torch.inf, -torch.inf, 460.0])])
    held = stored(values, dtype).float().double().numpy()
    wanted = values.double().numpy().clip(grid.min(), grid.max())
    nearest = np.abs(grid[None, :] - wanted[:, None]).min(axis=1)
    np.testing.assert_allclose(np.abs(held - wanted), nearest)
    assert stored(torch.tensor([torch.nan]), dtype).float().isnan().all()  # a broken row stays broken


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW.values()], ids=str)
def test_rows_are_written_moved_and_read_by_slot(dtype):
    cache = KVCache([LayerShape(2, 3, 4)], 6, 2, dtype, CPU)
    torch.manual_seed(0)
    keys, values = torch.randn(5, 2, 3), torch.randn(5, 2, 4)
    slots = torch.tensor([3, 9, 4, 12, 7])
    cache.write(0, slots, keys, values)
    cache.move(torch.tensor([9, 4]), torch.tensor([10, 9]))
    for pool, rows in ((cache.keys[0], keys), (cache.values[0], values)):
        assert pool.dtype == dtype
        found = gather(pool, torch.tensor([3, 10, 9, 12, 7]), torch.float32)
        assert torch.equal(found, stored(rows, dtype).float())
        assert not gather(pool, torch.tensor([0, 1]), torch.float32).any()


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 2.0}], ids=str)
def test_kernels_read_narrow_pools(dtype, options):
    rng = np.random.default_rng(2)
    torch.manual_seed(2)
    works = random_works(rng, 4, 5)
    batch = build(works, CPU)
    pages = allocator_of(works).total_pages
    narrow, wide = (KVCache([LayerShape(2, 8, 8)], pages, 4, one, CPU) for one in (dtype, torch.float32))
    for span in batch.spans:
        rows = torch.randn(span.kv_tokens, 2, 8), torch.randn(span.kv_tokens, 2, 8)
        narrow.write(0, torch.from_numpy(span.slots), *rows)
        wide.write(0, torch.from_numpy(span.slots), *(stored(one, dtype).float() for one in rows))
    q = torch.randn(len(batch), 4, 8)
    expected = paged_attention(q, wide.keys[0], wide.values[0], batch, scaling=0.3, **options)
    for kernel in (plan(batch), lambda *pools, **rest: paged_attention(*pools, batch, **rest)):
        found = kernel(q, narrow.keys[0], narrow.values[0], scaling=0.3, **options)
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("flag", NARROW)
def test_the_text_depends_on_the_format_alone(folder, flag):
    config = TargetConfig(device="cpu", kv_cache_dtype=flag, page_size=4, max_total_tokens=2048)
    model = load(folder, config)
    assert (model.cache_dtype, model.dtype) == (NARROW[flag], torch.float32)
    rng = np.random.default_rng(3)
    head = rng.integers(3, VOCAB, 30).tolist()
    params = [GREEDY, SamplingParams(0.8, seed=4), SamplingParams(1.0, seed=5)]
    requests = [opening(i, head + rng.integers(3, VOCAB, 5 + 9 * i).tolist(), one) for i, one in enumerate(params)]

    def engine(**flags):
        return TargetEngine(model, TargetConfig(**(vars(config) | flags)), DRAFT_MODES)

    alone = {i: run(engine(disable_radix_cache=True), [one]).new[i] for i, one in enumerate(requests)}
    assert run(engine(), requests).new == alone
    assert run(engine(chunked_prefill_size=7, max_total_tokens=100), requests).new == alone
    right = [[*one.tokens.tolist(), *alone[i]] for i, one in enumerate(requests)]

    def proposals(session_id, path):
        ahead = right[session_id][len(path) : len(path) + int(rng.integers(0, 6))]
        return [random_tree(rng, session_id, path, VOCAB, 6), chain(session_id, path, ahead)]

    speculative = run(engine(), requests, proposals)
    assert speculative.new == alone
    assert speculative.accepted > 20


def test_narrow_pools_hold_more_tokens(folder):
    wide, narrow = (
        load(folder, TargetConfig(device="cpu", kv_cache_dtype=flag)) for flag in ("auto", "fp8_e4m3")
    )  # fmt: skip
    assert token_bytes(wide.shapes, wide.cache_dtype) == 4 * token_bytes(narrow.shapes, narrow.cache_dtype)
    sizes = []
    for model in (wide, narrow):
        cache = TargetEngine(model, TargetConfig(device="cpu", max_total_tokens=160)).cache
        sizes.append(sum(pool.nbytes for pool in (*cache.keys, *cache.values)))
    assert sizes[0] == 4 * sizes[1]


def test_formats_that_do_not_fit_are_refused_by_name(monkeypatch):
    assert pick_cache_dtype("auto", torch.float16, CPU) == torch.float16
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype bf16 .* --dtype float16"):
        pick_cache_dtype("bf16", torch.float16, CPU)
    cuda = torch.device("cuda")
    for capability, fits in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert pick_cache_dtype("fp8_e5m2", torch.bfloat16, cuda) == torch.float8_e5m2
        if fits:
            assert pick_cache_dtype("fp8_e4m3", torch.bfloat16, cuda) == torch.float8_e4m3fn
        else:
            with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e4m3 .* fp8_e5m2"):
                pick_cache_dtype("fp8_e4m3", torch.bfloat16, cuda)
