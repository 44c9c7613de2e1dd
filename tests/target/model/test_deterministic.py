"""--deterministic: batch invariance of modules, texts and log-probabilities."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices import rowwise
from services.target.kernels.cpu.matrices.rowwise import Function
from services.target.model.deterministic import invariant_mode
from services.target.model.modules import ModuleRunner
from services.target.model.native import ProgramRunner
from services.target.sampling import logprobs
from tests.support.checkpoints.families import FAMILIES, write_family
from tests.support.target.driving import chain, engine_of, load_model, opening, random_tree, run
from tests.support.tiny import VOCAB, write_model

pytestmark = pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
# Wide enough for a sum's order to show in bfloat16, and with experts whose rows end within a vector.
WIDER = {"hidden_size": 272, "moe_intermediate_size": 40, "initializer_range": 0.2}
# What is loaded, and how; all in bfloat16.
MODELS = {
    "qwen3-moe": {}, "glm-4.5": {}, "deepseek-v3": {}, "gpt-oss": {}, "phi-3": {}, "cohere-2": {}, "qwen3": {},
    "gemma-3": {},
    "qwen3-moe in fp8": {"kv_cache_dtype": "fp8_e4m3"}, "deepseek-v3 in fp8": {"kv_cache_dtype": "fp8_e5m2"},
    "qwen3-moe in int8": {"quantization": "int8"},
}  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Models by name, each loaded once."""

    @functools.cache
    def load(name, **flags):
        family = name.split()[0]
        folder = tmp_path_factory.getbasetemp() / f"deterministic-{family}"
        if not folder.exists():
            write_family(folder, family, **WIDER)
        flags = {"dtype": "bfloat16", "deterministic": True} | MODELS.get(name, {}) | flags
        return load_model(folder, trust_remote_code=FAMILIES[family].remote, **flags)

    return load


@pytest.fixture
def threads():
    """More threads than one: PyTorch divides rows, and a single row's numbers, among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


# --- kernels ---


def one(rows):
    return torch.tensor([0, rows]), torch.tensor([0])


@pytest.mark.parametrize("by_inputs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(dtype, by_inputs, threads):
    torch.manual_seed(0)
    for rows, inputs, outputs in ((1, 7, 5), (5, 33, 67), (70, 100, 65), (3, 1, 9), (9, 64, 40)):
        x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(1, outputs).to(dtype)
        weight = torch.randn(1, outputs, inputs).to(dtype)
        if by_inputs:
            weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
        found = rowwise.product(x, weight, bias, *one(rows))
        expected = F.linear(x.double(), weight[0].double(), bias[0].double())
        torch.testing.assert_close(found.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        for row in range(rows):
            assert torch.equal(rowwise.product(x[row : row + 1], weight, bias, *one(1))[0], found[row])


def test_products_of_groups():
    torch.manual_seed(1)
    x, weight = torch.randn(10, 24), torch.randn(5, 6, 24)
    found = invariant_mode.CpuKernels().grouped(x, weight, None, torch.tensor([3, 0, 6, 1, 0]))
    expected = torch.cat([x[:3] @ weight[0].T, x[3:9] @ weight[2].T, x[9:] @ weight[3].T])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_function_of_a_number_does_not_depend_on_its_place(dtype, threads):
    torch.manual_seed(2)
    x = torch.randn(5000).to(dtype) * 4
    functions = {
        "sigmoid": (functools.partial(rowwise.apply, Function.SIGMOID), torch.sigmoid),
        "silu": (functools.partial(rowwise.apply, Function.SILU), F.silu),
        "gelu": (functools.partial(rowwise.apply, Function.GELU_TANH), functools.partial(F.gelu, approximate="tanh")),
        "cos": (functools.partial(rowwise.in_pieces, torch.cos), torch.cos),
        "softplus": (functools.partial(rowwise.in_pieces, F.softplus), F.softplus),
    }
    for name, (function, plain) in functions.items():
        whole = function(x)
        torch.testing.assert_close(whole, plain(x), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5, msg=name)
        for start, stop in ((0, 1), (3, 20), (17, 4100), (4999, 5000)):
            assert torch.equal(function(x[start:stop]), whole[start:stop]), name
    assert rowwise.apply(Function.SIGMOID, torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_inside_the_mode(dtype, threads):
    """Every replaced operator agrees with PyTorch, for single rows and for many."""
    torch.manual_seed(3)
    x, square, batch = torch.randn(1, 6, 40).to(dtype), torch.randn(40, 40).to(dtype), torch.randn(6, 40, 8).to(dtype)
    calls = {
        "linear": lambda x: F.linear(x, square, square[0]),
        "matmul": lambda x: x @ square,
        "vector": lambda x: x @ square[0],
        "bmm": lambda x: (x[0, :, None] @ batch[: x.shape[1]])[None],
        "outer": lambda x: x[..., None] @ x[..., None, :],
        "addmm": lambda x: torch.addmm(square[:1], x[0], square, beta=0.5, alpha=2.0)[None],
        "mean": lambda x: x.float().pow(2).mean(-1, keepdim=True),
        "small sum": lambda x: x[..., :5].sum(dim=-1),
        "whole sum": lambda x: x.sum(dim=(0, 2))[None],
        "gelu": lambda x: F.gelu(x),
        "silu": lambda x: F.silu(x, inplace=False),
        "method": lambda x: (x * 3).sigmoid() + torch.tanh(x),
        "power": lambda x: x.abs() ** 1.3,
        "cosine": lambda x: x.cos(),
    }
    mode = invariant_mode.of(CPU)
    for name, call in calls.items():
        expected = call(x)
        with mode:
            found, alone = call(x), call(x[:, :1])
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, msg=name)
        assert torch.equal(found[:, :1], alone), name
    with mode, pytest.raises(ConfigError, match=r"does not cover torch\.functional\.einsum"):
        torch.einsum("bti,ij->btj", x, square)


@pytest.mark.parametrize("vocabulary", [300, 40_000])
def test_log_probabilities_of_a_row_alone_and_of_several(vocabulary, threads):
    torch.manual_seed(4)
    logits = torch.randn(5, vocabulary)
    tokens = torch.arange(5)
    together = logprobs.score(logits, torch.arange(5), tokens, 3)
    for row in range(5):
        alone = logprobs.score(logits, torch.tensor([row]), tokens[row : row + 1], 3)
        assert torch.equal(alone.values[0], together.values[row])
        assert torch.equal(alone.top_values[0], together.top_values[row])


# --- models ---


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_all_families_pass_the_check_at_start_up(load, name, dtype):
    model = load(name, dtype=dtype)
    assert isinstance(model.runner, ModuleRunner | ProgramRunner)


def test_the_text_is_that_of_the_plain_operators(load):
    for name in ("qwen3-moe", "glm-4.5", "deepseek-v3", "gpt-oss"):
        prompts = [opening(i, list(range(5 + i, 30 + 3 * i))) for i in range(3)]
        exact = run(engine_of(load(name, dtype="float32")), prompts)
        assert exact.new == run(engine_of(load(name, dtype="float32", deterministic=False)), prompts).new, name


def without(monkeypatch, names):
    """The mode leaves some operators as they are."""

    class Careless(invariant_mode.BatchInvariantMode):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            for name in names:
                self._table.pop(name)

    monkeypatch.setattr(invariant_mode, "BatchInvariantMode", Careless)


def test_a_module_without_batch_invariance_is_named(load, monkeypatch):
    without(monkeypatch, [F.linear])
    with pytest.raises(ConfigError, match=r"--deterministic: model\.layers\.0\.mlp\.gate of Qwen3MoeForCausalLM"):
        load("qwen3-moe", dtype="float32", context_length=300)  # one that was not loaded before


REFUSED = {
    "torch_native": {"attention_backend": "torch_native"},
    "--tp-size 2": {"tp_size": 2},
    "--enable-torch-compile": {"enable_torch_compile": True},
    "-threshold-single": {"speculative_accept_threshold_single": 0.5},
    "-threshold-acc": {"speculative_accept_threshold_acc": 0.5},
}


@pytest.mark.parametrize("message", REFUSED)
def test_incompatible_flags_are_rejected(message, tmp_path):
    with pytest.raises(ConfigError, match=f"--deterministic.*{message}"):
        load_model(write_model(tmp_path), deterministic=True, **REFUSED[message])


def test_without_kernels_it_is_refused(tmp_path, monkeypatch):
    def gone():
        raise library.Unavailable("there is no C++ compiler")

    folder = write_model(tmp_path)
    monkeypatch.setattr(library, "load", gone)
    with pytest.raises(ConfigError, match=r"--deterministic needs the compiled kernels.*no C\+\+ compiler"):
        load_model(folder, deterministic=True)


# --- engines ---

_RNG = np.random.default_rng(7)
_SHARED = _RNG.integers(0, VOCAB, 40).tolist()
PROMPTS = [
    _RNG.integers(0, VOCAB, 1).tolist(),
    _SHARED[:20] + _RNG.integers(0, VOCAB, 15).tolist(),
    _SHARED,
    _RNG.integers(0, VOCAB, 7).tolist(),
    _SHARED + _RNG.integers(0, VOCAB, 30).tolist(),
]  # fmt: skip
LENGTH = 14


def requests(indices, temperature):
    return [opening(i, PROMPTS[i], SamplingParams(temperature, seed=i), max_tokens=LENGTH, logprobs=3) for i in indices]


def reported(result):
    """Tokens and log-probabilities of each session, bit by bit."""
    return {
        session: (
            result.new[session],
            *(
                b"".join(getattr(commit.logprobs, part).tobytes() for commit in commits)
                for part in ("values", "top_tokens", "top_values")
            ),
        )
        for session, commits in result.commits.items()
    }


@pytest.fixture(scope="module")
def plain(load):
    """What sessions are reported that are decoded plainly, each alone with its engine."""

    @functools.cache
    def plain(name, temperature):
        engines = ((one, engine_of(load(name))) for one in requests(range(len(PROMPTS)), temperature))
        return {i: answer for one, engine in engines for i, answer in reported(run(engine, [one])).items()}

    return plain


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_text_does_not_depend_on_proposals_batch_pages_or_preemption(load, plain, data):
    name = data.draw(st.sampled_from(sorted(MODELS)))
    temperature = data.draw(st.sampled_from([0.0, 1.0]))
    expected = plain(name, temperature)
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    flags = {
        "page_size": page_size,
        "chunked_prefill_size": data.draw(st.sampled_from([7, 16, 50, 512])),
        "max_total_tokens": data.draw(st.sampled_from([128, 256, 4096])),
        "max_running_requests": data.draw(st.sampled_from([2, 7])),
        "disable_radix_cache": data.draw(st.booleans()),
        "speculative_num_draft_tokens": data.draw(st.sampled_from([1, 4, 12])),
    }
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))

    def proposals(session, path):
        done = len(path) - len(PROMPTS[session])
        right = chain(session, path, expected[session][0][done : done + int(rng.integers(0, 9))])
        return [random_tree(rng, session, path, VOCAB, int(rng.integers(1, 9))), right][int(rng.integers(0, 2)) :]

    engine = engine_of(load(name), **flags)
    for _ in range(2):  # the second time, what is cached was computed by the first
        chosen = data.draw(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, unique=True))
        found = reported(run(engine, requests(chosen, temperature), proposals))
        assert found == {i: expected[i] for i in chosen}


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3", "deepseek-v3 in fp8"])
def test_a_page_that_was_decoded_is_one_that_was_prefilled(load, name):
    """Pages hold the same bytes whether a prompt's chunk, plain steps or drafts wrote them, and are served as such."""
    model = load(name)
    text = run(engine_of(model), [opening(1, PROMPTS[2], max_tokens=24)]).new[1]
    whole = PROMPTS[2] + text
    written = []
    for prompt in (len(PROMPTS[2]), len(whole) - 1):  # decoded from the prompt on; prefilled at once
        engine = engine_of(model, page_size=4, disable_radix_cache=True)
        engine.open(opening(1, whole[:prompt], max_tokens=len(whole) - prompt + 2))
        session = engine.sessions.by_id[1].session
        while session.computed < len(whole) - 1:
            engine.receive([chain(1, session.tokens.tolist(), whole[session.length : session.length + 3])], ())
            engine.step()
        slots = torch.from_numpy(session.table.slots(0, len(whole) - 1))
        pools = [pool.view(torch.uint8).flatten(0, 1)[slots] for pool in engine.cache._pools]
        written.append(pools)
    assert all(map(torch.equal, *written))
    engine = engine_of(model, page_size=4)
    run(engine, [opening(1, PROMPTS[2], max_tokens=24)])
    again = run(engine, [opening(2, whole, max_tokens=8)])
    assert again.commits[2][0].cached_tokens > len(PROMPTS[2])
    assert again.new == run(engine_of(model), [opening(2, whole, max_tokens=8)]).new
