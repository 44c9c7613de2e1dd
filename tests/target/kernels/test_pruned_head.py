"""Tokens drawn behind a narrow copy of the head are those of all logits, to the last tie."""

import numpy as np
import pytest
import torch

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import Format, packed
from services.target.kernels.cpu.programs.program import Norm, Program
from services.target.kernels.cpu.programs.pruned_head import PrunedHead
from services.target.kernels.cpu.sampling import pack
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.model import program_builder
from services.target.model.native import ProgramRunner
from services.target.sampling.step_sampler import sampling_plan as plan_of
from services.target.step.batch import SamplingPlan, SessionWork, build
from tests.support.target.driving import engine_of, load_model, opening, random_tree, run
from tests.support.tiny import VOCAB, write_model

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine"),
]

CPU = torch.device("cpu")
FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
FEW = 4  # rows that are pruned together
PARAMS = [
    SamplingParams(0.0),
    SamplingParams(1.0, seed=1),
    SamplingParams(0.3, seed=2),
    SamplingParams(3.0, seed=3),
    SamplingParams(100.0, seed=4),
    SamplingParams(1e-6, seed=5),
]


def program_of(table, weight, dtype, pruned):
    """From a token's row of a table to its logits, and to nothing else."""
    program = Program(2, dtype, dtype, table.shape[1])
    program.embed(table.to(dtype).contiguous())
    copy = None
    if pruned:
        copy = PrunedHead(*weight.shape)
        copy.fill(torch.arange(len(weight)), weight.to(dtype))
    program.head(packed(weight, FORMATS[dtype]), Norm(torch.ones(table.shape[1]), 1e-6), pruned=copy)
    return program


class _Entry:
    """As much of a session's as a plan of draws reads."""

    def __init__(self, params):
        self.sampling = pack(params)


def drawn(program, tokens, params):
    """The token that follows each, each in a session of its own, and the logits."""
    prefix, works = PrefixCache(PageAllocator(len(tokens) + 1, 4)), []
    for i, token in enumerate(tokens):
        session = Session(opening(i, [token]), prefix)
        session.table.reserve(1)
        works.append(SessionWork(Chunk(session, 0, 1)))
    plan = plan_of(works, [_Entry(one) for one in params])
    assert isinstance(plan, SamplingPlan)
    cache = KVCache([LayerShape(1, 16, 16)], len(tokens) + 1, 4, torch.float32, CPU)
    logits, _, found = program.run(build(works, CPU, None, plan), cache)
    return found.tolist(), logits.clone()


def case(kind, rng, width, vocab):
    """States and heads: of random numbers; whose largest logits lie close together; with outliers; of zeros."""
    table = torch.randn(40, width, generator=rng)
    weight = torch.randn(vocab, width, generator=rng)
    if kind == "close":
        weight = weight[:1] + 1e-3 * weight
    elif kind == "ties":
        weight = weight[torch.randint(0, 50, (vocab,), generator=rng)]
    elif kind == "outliers":
        weight[torch.randint(0, vocab, (30,)), torch.randint(0, width, (30,))] *= 300.0
        table[:, ::17] *= 50.0
    elif kind == "zeros":
        weight[:] = 0.0
    return table, weight


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", ["random", "close", "ties", "outliers", "zeros"])
@pytest.mark.parametrize(("width", "vocab"), [(64, 4096), (96, 1001), (176, 333)])
def test_tokens_are_those_of_all_logits(dtype, kind, width, vocab):
    rng = torch.Generator().manual_seed(width + vocab)
    table, weight = case(kind, rng, width, vocab)
    whole, pruned = (program_of(table, weight, dtype, which) for which in (False, True))
    for turn in range(24):
        tokens = torch.randint(0, len(table), (1 + turn % FEW,), generator=rng).tolist()
        params = [PARAMS[(i + turn) % len(PARAMS)] for i in range(len(tokens))]
        assert drawn(pruned, tokens, params)[0] == drawn(whole, tokens, params)[0]


def test_bounds_hold_and_few_panels_are_within_them():
    rng = torch.Generator().manual_seed(5)
    table, weight = torch.randn(40, 256, generator=rng), torch.randn(9000, 256, generator=rng).bfloat16().float()
    copy = PrunedHead(*weight.shape)
    copy.fill(torch.arange(len(weight)), weight)
    whole, pruned = (program_of(table, weight, torch.bfloat16, which) for which in (False, True))
    (_, logits), (_, rough) = (drawn(program, range(FEW), [PARAMS[0]] * FEW) for program in (whole, pruned))
    off = (logits - rough).abs()
    x = table[:FEW].bfloat16().float()
    x = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
    bound = x.norm(dim=1)[:, None] * (copy.error_norms + 0.02 * copy.narrow_norms)[:9000]
    assert (off > 0).any()
    assert (off < bound).all()
    assert (copy.error_norms[:9000] < 0.03 * copy.narrow_norms[:9000]).all()


def test_where_more_is_asked_for_all_logits_are_there():
    rng = torch.Generator().manual_seed(6)
    table, weight = case("random", rng, 64, 1000)
    whole, pruned = (program_of(table, weight, torch.bfloat16, which) for which in (False, True))
    for other in (SamplingParams(1.0, top_p=0.9, seed=1), SamplingParams(1.0, top_k=5), SamplingParams(1.0, min_p=0.1)):
        params = [*PARAMS[: FEW - 1], other]
        (expected, logits), (found, same) = (drawn(program, range(FEW), params) for program in (whole, pruned))
        assert found == expected
        assert torch.equal(logits, same)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_rows_without_finite_logits_sample_nothing(broken):
    rng = torch.Generator().manual_seed(7)
    table, weight = case("random", rng, 64, 1000)
    table[3, 5] = broken
    for pruned in (False, True):
        tokens, _ = drawn(program_of(table, weight, torch.float32, pruned), [2, 3, 4], PARAMS[:3])
        assert [token < 0 for token in tokens] == [False, True, False]
    weight[700, 9] = broken * table[2, 9].sign()
    for params in (PARAMS[0], PARAMS[1]):
        expected, _ = drawn(program_of(table, weight, torch.float32, False), [2], [params])
        assert drawn(program_of(table, weight, torch.float32, True), [2], [params])[0] == expected == [-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_unchanged_by_proposals_multi_step_decoding_and_weight_updates(
    tmp_path, monkeypatch, dtype, temperature
):
    folder = write_model(tmp_path, seed=1)
    requests = [opening(i, [5 + i, 6, 7], SamplingParams(temperature, seed=i), max_tokens=30) for i in range(5)]

    def texts(model):
        rng = np.random.default_rng(3)
        found = [run(engine_of(model, coalesce_seconds=gather), requests).new for gather in (0.0, 60.0)]
        speculative = run(engine_of(model), requests, lambda i, path: [random_tree(rng, i, path, VOCAB, 6)])
        assert speculative.verified > 0
        assert found[0] == found[1] == speculative.new
        return found[0]

    models = []
    for least in (10**9, 1):
        monkeypatch.setattr(program_builder, "MIN_PRUNED_OUTPUTS", least)
        models.append(load_model(folder, dtype=dtype))
    assert all(isinstance(model.runner, ProgramRunner) for model in models)
    assert models[0].runner.weight_bytes > models[1].runner.weight_bytes
    assert texts(models[0]) == texts(models[1])
    changed = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(9)) * 0.1
        for name, shape in models[0].runner.weights().items()
        if "head" in name or "embed" in name
    }
    before = texts(models[0])
    for model in models:
        model.runner.update(changed)
    assert texts(models[0]) == texts(models[1]) != before
