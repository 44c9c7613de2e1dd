"""The compiled kernel samples the oracle's tokens for all kinds of logits, parameters, masks and batches."""

import dataclasses
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.serving.features import FeatureSpec
from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.sampling import SamplingParams, sample
from services.target.kernels.cpu import library
from services.target.kernels.cpu import sampling as compiled
from services.target.sampling import step_sampler as drawing
from services.target.sampling.row_params import RowRequest, gather
from services.target.sampling.sampler import sample_adjusted
from services.target.step.batch import SamplingPlan
from services.target.step.token_mask import TokenMask
from tests.support.target.driving import engine_of, load_model, opening, random_tree, run
from tests.support.target.sampling_params import PARAMS
from tests.support.tiny import VOCAB, write_model, write_tokenizer

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine"),
]
CPU = torch.device("cpu")
COMMON = [
    SamplingParams(0.0),
    SamplingParams(1.0, seed=1),
    SamplingParams(0.7, top_p=0.9, seed=2),
    SamplingParams(1.0, top_k=50, seed=3),
    SamplingParams(0.8, top_k=40, top_p=0.95, min_p=0.05, seed=4),
    SamplingParams(1.5, min_p=0.02, seed=5),
    SamplingParams(2.0, top_p=0.99, seed=6),
]


def kernel(logits, params, positions, mask=None):
    """One session a row."""
    packed = b"".join(map(compiled.pack, params))
    plan = SamplingPlan(packed, array("q", [1] * len(params)), array("q", positions))
    return compiled.sample(torch.from_numpy(logits), plan, mask).tolist()


def oracle(logits, params, positions):
    with np.errstate(over="ignore"):
        return [sample(row, one, t) for row, one, t in zip(logits, params, positions, strict=True)]


def twin(logits, params, positions):
    requests = [RowRequest(one, [t], [[]]) for one, t in zip(params, positions, strict=True)]
    return sample_adjusted(torch.from_numpy(logits), gather(requests, CPU)).tolist()


def check(logits, params, positions):
    tokens = kernel(logits, params, positions)
    assert tokens == oracle(logits, params, positions)
    assert tokens == twin(logits, params, positions)


def shaped(rng, shape, vocab):
    """Logits of a kind that a kernel may stumble over. [vocab] float32"""
    x = rng.standard_normal(vocab) * rng.choice([0.01, 0.5, 3.0, 30.0, 1000.0])
    if shape == "ties":
        x = np.round(x * 4) / 4
    elif shape == "flat":
        x[:] = rng.choice([0.0, 1.5, -7.0, 1e30, -1e30])
    elif shape == "zeros of both signs":
        x = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    elif shape == "few possible":
        x[rng.random(vocab) < 0.95] = -np.inf
        x[rng.integers(vocab)] = 1.0
    elif shape == "one possible":
        x[:] = -np.inf
        x[rng.integers(vocab)] = -3.0
    elif shape == "spikes":
        x[rng.integers(0, vocab, 3)] += rng.choice([5.0, 20.0, 1000.0])
    elif shape == "zipf":
        x = -np.log(np.arange(1, vocab + 1)) * rng.choice([0.5, 1.0, 2.0])
        rng.shuffle(x)
    elif shape == "huge":
        x = np.clip(x * 1e36, -3e38, 3e38)
    return x.astype(np.float32)


SHAPES = ("plain", "ties", "flat", "zeros of both signs", "few possible", "one possible", "spikes", "zipf", "huge")


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_oracle_at_small_sizes(shape):
    rng = np.random.default_rng(SHAPES.index(shape))
    for vocab in (1, 2, 15, 16, 17, 100, 255, 256, 257, 3000):
        logits = np.stack([shaped(rng, shape, vocab) for _ in PARAMS])
        check(logits, PARAMS, rng.integers(0, 2**40, len(PARAMS)).tolist())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_oracle_at_a_real_size(shape):
    rng = np.random.default_rng(1)
    logits = np.stack([shaped(rng, shape, 128256) for _ in COMMON])
    check(logits, COMMON, rng.integers(0, 10_000, len(COMMON)).tolist())


@settings(max_examples=75, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocab=st.integers(1, 700),
    shape=st.sampled_from(SHAPES),
    temperature=st.floats(0.0, 100.0),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 60, 500, 10**6]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0)),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
)
def test_any_parameters(seed, vocab, shape, temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(seed)
    logits = np.stack([shaped(rng, shape, vocab) for _ in range(4)])
    params = [SamplingParams(temperature, top_k, top_p, min_p, seed)] * 4
    check(logits, params, rng.integers(0, 2**33, 4).tolist())


def test_every_token_can_win_by_noise_alone():
    # All logits alike, so that the noise decides: each of many positions has its own winner.
    params = SamplingParams(1.0, seed=2**64 - 1)
    logits = np.zeros((500, 3000), np.float32)
    tokens = kernel(logits, [params] * 500, range(500))
    assert tokens == oracle(logits, [params] * 500, range(500))
    assert len(set(tokens)) > 400


def test_a_mass_that_float32_cannot_decide_is_summed_exactly():
    # The boundary of the nucleus is at a token, closer than float32 resolves.
    logits = np.zeros((64, 4096), np.float32)
    params = [SamplingParams(1.0, top_p=(1024 + (i % 5 - 2) * 1e-9) / 4096, seed=i) for i in range(64)]
    check(logits, params, range(64))


def test_logits_that_are_not_finite_give_no_token():
    logits = np.zeros((6, 5000), np.float32)
    logits[0, 4999] = np.nan
    logits[1, 17] = np.inf
    logits[2] = -np.inf
    logits[3, :16] = np.nan
    logits[4, 1] = -np.inf
    for params in COMMON:
        tokens = kernel(logits, [params] * 6, range(6))
        assert tokens[:4] == [-1] * 4
        assert tokens[4:] == oracle(logits[4:], [params] * 2, range(4, 6))


@pytest.mark.parametrize("vocab", [5, 33, 320, 5000])
def test_only_allowed_tokens_are_sampled(vocab):
    rng = np.random.default_rng(vocab)
    rows, bits = [0, 3, 5], -(-vocab // 32) * 32
    allowed = rng.random((3, bits)) < 0.2
    allowed[:, 2] = True
    allowed[:, vocab:] = True  # bits of no token
    allowed[2, :vocab] = False  # nothing at all
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    mask = TokenMask(torch.tensor(rows), torch.from_numpy(words))
    for params in COMMON:
        logits = rng.standard_normal((6, vocab)).astype(np.float32) * 5
        logits[0, ~allowed[0, :vocab]] = np.nan  # what may not be drawn is not looked at
        masked = logits.copy()
        masked[rows] = np.where(allowed[:, :vocab], logits[rows], -np.inf)
        tokens = kernel(logits, [params] * 6, range(6), mask)
        assert tokens == [*oracle(masked[:5], [params] * 5, range(5)), -1]


def test_a_sample_does_not_depend_on_other_rows():
    rng = np.random.default_rng(0)
    logits = np.stack([shaped(rng, shape, 49152) for shape in ("plain", "spikes", "zipf", "flat") * 8])
    params = [COMMON[i % len(COMMON)] for i in range(32)]
    together = kernel(logits, params, range(32))
    assert together == [kernel(logits[i : i + 1], params[i : i + 1], [i])[0] for i in range(32)]
    order = rng.permutation(32)
    assert kernel(logits[order], [params[i] for i in order], order) == [together[i] for i in order]


def test_sessions_have_several_rows():
    logits = np.random.default_rng(1).standard_normal((6, 400)).astype(np.float32)
    packed = b"".join(map(compiled.pack, COMMON[:3]))
    plan = SamplingPlan(packed, array("q", [3, 1, 2]), array("q", [5, 6, 6, 9, 2, 3]))
    tokens = compiled.sample(torch.from_numpy(logits), plan)
    params = [COMMON[i] for i in (0, 0, 0, 1, 2, 2)]
    assert tokens.tolist() == oracle(logits, params, [5, 6, 6, 9, 2, 3])


# --- through the engine ---


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(write_tokenizer(tmp_path_factory.mktemp("model"))))


def requests():
    """Sessions that ask for everything that touches logits."""
    penalised = SamplingParams(
        0.9, top_p=0.8, seed=7, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias=((5, 3.0),)
    )
    rng = np.random.default_rng(5)
    prompts = [rng.integers(4, VOCAB, 20).tolist() for _ in range(12)]
    plain = [opening(i, prompts[i], params) for i, params in enumerate(COMMON)]
    return [
        *plain,
        opening(7, prompts[7], penalised, logprobs=3),
        opening(8, prompts[8], dataclasses.replace(penalised, temperature=0.0)),
        opening(9, prompts[9], SamplingParams(1.0, seed=9), grammar=Grammar(GrammarKind.REGEX, "[a-z]+[0-9]{4,8}")),
        opening(10, prompts[10], SamplingParams(5.0, seed=3), min_tokens=16, stop_token_ids=tuple(range(4, 200))),
        opening(11, prompts[11], SamplingParams(0.0), min_tokens=3, logprobs=2, prompt_logprobs=1),
    ]


def proposals():
    rng = np.random.default_rng(3)
    return lambda session_id, tokens: [random_tree(rng, session_id, tokens, VOCAB, 6)]


@pytest.mark.parametrize("speculative", [False, True])
def test_the_kernel_and_its_twin_generate_the_same_text(model, monkeypatch, speculative):
    calls = []
    real = compiled.sample
    monkeypatch.setattr(drawing.compiled, "sample", lambda *args: calls.append(1) or real(*args))
    ours = run(engine_of(model), requests(), proposals() if speculative else None)
    assert calls
    count = len(calls)
    monkeypatch.setattr(drawing.library, "available", lambda: False)
    theirs = run(engine_of(model), requests(), proposals() if speculative else None)
    assert len(calls) == count
    assert ours.new == theirs.new
    assert ours.reasons == theirs.reasons
    for session_id in (7, 11):
        for mine, other in zip(ours.commits[session_id], theirs.commits[session_id], strict=True):
            np.testing.assert_array_equal(mine.logprobs.values, other.logprobs.values)
            np.testing.assert_array_equal(mine.logprobs.top_tokens, other.logprobs.top_tokens)
    assert len(ours.new[10]) >= 16


@pytest.mark.parametrize("capture", [False, True])
def test_a_program_and_the_kernel_sample_the_same_tokens(model, capture, monkeypatch):
    seen = []
    forward = model.runner.forward

    def kept(batch, cache):
        outputs = forward(batch, cache)
        if batch.sampling is not None:
            seen.append((batch.sampling, outputs.logits.clone(), outputs.tokens.tolist()))
        return outputs

    monkeypatch.setattr(model.runner, "forward", kept)
    engine = engine_of(model)
    prompts = [list(range(3 + i, 40 + 3 * i)) for i in range(len(COMMON))]
    asked = [opening(i, prompts[i], params) for i, params in enumerate(COMMON)]
    if capture:
        engine.features.configure(3, FeatureSpec((1,)), b"")
        asked = [dataclasses.replace(one, feature_spec=3) for one in asked]
    run(engine, asked, proposals())
    assert max(len(tokens) for _, _, tokens in seen) > len(COMMON)  # with nodes
    for plan, logits, tokens in seen:
        assert tokens == compiled.sample(logits, plan).tolist()
