"""Drawing on the device: the same bits and the same tokens as the oracle in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.speculation import noise
from outrider.speculation.sampling import SamplingParams, sample
from services.target.sampling import sampler
from services.target.sampling.row_params import RowRequest, gather
from services.target.sampling.sampler import UNRESOLVED, gumbel, likeliest, rough_gumbel, sample_adjusted, token_bits
from tests.support.target.sampling_params import PARAMS

CPU = torch.device("cpu")


def check(logits, params, positions):
    """logits: [R, V]; one session a row."""
    requests = [RowRequest(p, [t], [[]]) for p, t in zip(params, positions, strict=True)]
    tokens = sampler.sample(torch.from_numpy(logits), gather(requests, CPU)).tolist()
    expected = [sample(row, p, t) for row, p, t in zip(logits, params, positions, strict=True)]
    assert tokens == expected


@given(
    seed=st.integers(0, 2**64 - 1),
    positions=st.lists(st.integers(0, 2**40), min_size=1, max_size=5),
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50),
)
def test_bits_are_those_of_numpy(seed, positions, tokens):
    keys = noise.position_keys(seed, np.array(positions))
    expected = noise.token_bits(keys[:, None, :], np.array(tokens)[None, :])
    assert token_bits(torch.from_numpy(keys.astype(np.int64)), torch.tensor(tokens)).tolist() == expected.tolist()


def test_gumbel_is_that_of_numpy_and_its_estimate_is_near():
    edges = np.concatenate([np.arange(2000), 2**32 - 1 - np.arange(2000), 2**31 + np.arange(-1000, 1000)])
    bits = np.concatenate([edges, np.random.default_rng(0).integers(0, 2**32, 100_000)]).astype(np.uint32)
    expected = noise.gumbel_from_bits(bits).astype(np.float64)
    words = torch.from_numpy(bits.view(np.int32))
    np.testing.assert_allclose(gumbel(words).numpy(), expected, rtol=2e-7)
    error = np.abs(rough_gumbel(words).numpy() - expected)
    assert error.max() < 0.3
    assert np.quantile(error, 0.95) < 1e-5


@pytest.mark.parametrize("vocab", [20, 3000])
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_tokens_are_those_of_the_oracle(vocab, spread):
    rng = np.random.default_rng(vocab)
    for start in range(3):
        logits = (spread * rng.standard_normal((len(PARAMS), vocab))).astype(np.float32)
        check(logits, PARAMS, range(start, start + len(PARAMS)))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_any_parameters_with_ties(seed, temperature, top_k, top_p, min_p):
    # Logits in steps of 1/4, as bfloat16 has them: ties at every border.
    logits = np.round(np.random.default_rng(seed).standard_normal((4, 50)) * 8).astype(np.float32) / 4
    check(logits, [SamplingParams(temperature, top_k, top_p, min_p, seed)] * 4, range(4))


def test_a_flat_distribution_needs_more_than_the_first_thousand():
    logits = np.random.default_rng(0).standard_normal((3, 5000)).astype(np.float32) * 0.1
    check(logits, [SamplingParams(1.0, top_p=0.95, seed=s) for s in range(3)], [7, 8, 9])


def test_without_waiting_an_uncovered_nucleus_is_unresolved():
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(np.stack([rng.standard_normal(5000) * spread for spread in (0.01, 6.0, 0.01)])).float()
    params = [SamplingParams(1.0, top_p=0.9, seed=3), SamplingParams(1.0, top_p=0.9, seed=3), SamplingParams(0.0)]
    rows = gather([RowRequest(one, [7], [[]]) for one in params], CPU)
    sure = sampler.sample(logits, rows).tolist()
    assert sample_adjusted(logits, rows, wait=False).tolist() == [UNRESOLVED, *sure[1:]]


def test_greedy_takes_the_lowest_of_equals():
    logits = np.zeros((2, 300), np.float32)
    logits[:, [40, 41, 200]] = 3.0
    check(logits, [SamplingParams(0.0), SamplingParams(1.0, top_k=1)], [0, 0])


@pytest.mark.parametrize("vocab", [1, 40, 64 * 5, 64 * 5 + 1])
def test_the_likeliest_is_the_first_of_equals_in_however_many_parts(vocab):
    logits = torch.randint(0, 5, (7, vocab)).float()
    logits[1] = 0.0
    logits[2, vocab // 2] = torch.nan
    for parts in (1, 8, 64):
        best, tokens = likeliest(logits, parts)
        expected = logits.max(-1)
        assert torch.equal(tokens, expected.indices)
        torch.testing.assert_close(best, expected.values, rtol=0, atol=0, equal_nan=True)


def test_banned_tokens_are_not_sampled_and_have_no_mass():
    logits = np.array([[5.0, 4.0, 1.0, 0.0]] * 3, np.float32)
    params = [SamplingParams(0.0), SamplingParams(1.0, top_k=2, seed=4), SamplingParams(0.7, seed=5)]
    rows = gather([RowRequest(p, [0], [[0, 3]]) for p in params], CPU)
    masked = np.where([True, False, False, True], -np.inf, logits)
    assert sampler.sample(torch.from_numpy(logits), rows).tolist() == [
        int(sample(row, p, 0)) for row, p in zip(masked, params, strict=True)
    ]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("wait", [True, False])
def test_rows_without_finite_logits_do_not_affect_other_rows(params, wait):
    logits = torch.randn(5, 1500, generator=torch.Generator().manual_seed(0))
    requests = [RowRequest(params, range(7, 12), [[]] * 5)]
    expected = sample_adjusted(logits, gather(requests, CPU), wait=wait)
    logits[1, 3], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf
    found = sample_adjusted(logits, gather(requests, CPU), wait=wait)
    assert found.tolist() == [int(expected[0]), -1, -1, -1, int(expected[4])]


def test_logits_that_are_not_finite_give_no_token():
    logits = torch.tensor([[1.0, float("nan")], [1.0, 2.0], [float("inf"), 0.0]])
    rows = gather([RowRequest(SamplingParams(0.0), [0, 1], [[], []]), RowRequest(SamplingParams(), [0], [[]])], CPU)
    assert sampler.sample(logits, rows).tolist() == [-1, 1, -1]


def test_samples_follow_the_distribution():
    p = np.array([0.5, 0.25, 0.15, 0.1])
    logits = torch.from_numpy(np.log(p)).float().expand(20_000, 4)
    rows = gather([RowRequest(SamplingParams(1.0, seed=11), range(20_000), [[]] * 20_000)], CPU)
    counts = np.bincount(sampler.sample(logits, rows).numpy(), minlength=4)
    assert stats.chisquare(counts, p * 20_000).pvalue > 1e-3


def test_rows_of_a_session_have_their_own_positions():
    logits = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    params = SamplingParams(1.0, seed=8)
    tokens = sampler.sample(
        torch.from_numpy(logits), gather([RowRequest(params, [5, 6, 6], [[], [], []])], CPU)
    ).tolist()
    assert tokens == [sample(row, params, t) for row, t in zip(logits, [5, 6, 6], strict=True)]
