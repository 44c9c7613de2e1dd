"""Pools of 8 bits in the compiled kernels: the bits that PyTorch stores and reads, in place, by whole programs."""

import numpy as np
import pytest
import torch

from outrider.config import TargetConfig
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from services.target.kernels.cpu import library
from services.target.kernels.cpu.attention.paged import NativeAttention
from services.target.kernels.cpu.library import AttentionShape
from services.target.kernels.cpu.matrices.weights import Format, packed
from services.target.kernels.cpu.programs.program import Buffer, Norm, Program
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape, stored
from services.target.kernels.reference import paged_attention
from services.target.model.loading.load import load
from services.target.model.native import ProgramRunner
from services.target.step.batch import SessionWork, build
from tests.support.target.driving import opening
from tests.support.target.works import allocator_of, random_works
from tests.support.tiny import write_model

CPU = torch.device("cpu")
EIGHT_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
pytestmark = pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")


def _prompt(tokens):
    session = Session(opening(1, tokens), PrefixCache(PageAllocator(50, 4)))
    session.table.reserve(len(tokens))
    return [SessionWork(Chunk(session, 0, len(tokens)))]


def _cache_of(works, shape, page_size, dtype):
    return KVCache([shape], allocator_of(works).total_pages, page_size, dtype, CPU)


@pytest.mark.parametrize("dtype", EIGHT_BITS.values(), ids=EIGHT_BITS)
def test_programs_store_the_bits_that_pytorch_does(dtype):
    width = 64
    torch.manual_seed(0)
    cells = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = cells[cells.isfinite()].unique()
    middles = (grid[1:] + grid[:-1]) / 2  # ties, and their neighbours on both sides
    near = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (-1e9, 1e9)]
    numbers = torch.cat([grid, middles, *near, torch.randn(900) * 2.0 ** torch.randint(-20, 17, (900,)), grid * 1.7e3])
    numbers = numbers[: len(numbers) // width * width].view(-1, width) + 0.0  # a sum is never -0
    table = torch.cat([numbers, torch.full((1, width), torch.nan)])  # a broken row stays broken
    works = _prompt(range(len(table)))
    batch = build(works, CPU)
    program = Program(2, torch.float32, dtype, width)
    program.embed(table)
    # Queries, keys and values are the row itself; positions turn nothing.
    program.linear(packed(torch.eye(width).repeat(3, 1), Format.FLOAT32), Buffer.RESIDUAL, Buffer.WIDE)
    shape = AttentionShape(1, 1, width, width, 1.0, 0, 0.0, None)
    program.attend(0, shape, torch.ones(512, width // 2), torch.zeros(512, width // 2))
    program.head(packed(torch.eye(width), Format.FLOAT32), Norm(torch.ones(width), 1e-6))
    cache = _cache_of(works, LayerShape(1, width, width), 4, dtype)
    program.run(batch, cache)
    wanted = stored(table, dtype)
    slots = torch.from_numpy(batch.spans[0].slots)
    for pool in (cache.keys[0], cache.values[0]):
        found = pool.view(torch.uint8).flatten(0, 1)[slots, 0]
        assert torch.equal(found[:-1], wanted[:-1].view(torch.uint8))
        assert found[-1].view(dtype).float().isnan().all()


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", EIGHT_BITS.values(), ids=EIGHT_BITS)
def test_every_number_is_read_exactly(dtype, computed):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(dtype).float().isfinite()]
    works = _prompt([3])
    batch = build(works, CPU)  # a row that sees one key answers with its value
    cache = _cache_of(works, LayerShape(1, 16, len(codes)), 4, dtype)
    cache.values[0].view(torch.uint8)[:] = codes
    cache.keys[0].view(torch.uint8)[:] = 0
    found = NativeAttention(batch)(torch.ones(1, 1, 16, dtype=computed), cache.keys[0], cache.values[0], scaling=1.0)
    assert torch.equal(found[0, 0].float(), codes.view(dtype).float())


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", EIGHT_BITS.values(), ids=EIGHT_BITS)
@pytest.mark.parametrize(("heads", "dims"), [((6, 2), (20, 12)), ((8, 4), (128, 128)), ((4, 1), (7, 5))])
def test_attention_agrees_with_its_twin(dtype, computed, heads, dims):
    rng = np.random.default_rng(sum(dims))
    torch.manual_seed(1)
    for page_size, longest, nodes in ((16, 300, 20), (5, 10, 150)):
        works = random_works(rng, page_size, 3, longest, nodes)
        batch = build(works, CPU)
        cache = _cache_of(works, LayerShape(heads[1], *dims), page_size, dtype)
        for span in batch.spans:
            rows = (torch.randn(span.kv_tokens, heads[1], dim) for dim in dims)
            cache.write(0, torch.from_numpy(span.slots), *rows)
        q = torch.randn(len(batch), heads[0], dims[0]).to(computed)
        options = {"scaling": dims[0] ** -0.5, "window": rng.choice([None, 7])}
        expected = paged_attention(q, cache.keys[0], cache.values[0], batch, **options)
        found = NativeAttention(batch)(q, cache.keys[0], cache.values[0], **options)
        error = 1e-5 if computed == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=error, atol=error)


@pytest.mark.parametrize("flag", EIGHT_BITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_with_narrow_pools_run_as_programs(tmp_path, flag, dtype):
    model = load(write_model(tmp_path), TargetConfig(device="cpu", dtype=dtype, kv_cache_dtype=flag))
    assert isinstance(model.runner, ProgramRunner)
    assert model.cache_dtype == EIGHT_BITS[flag]
