"""The noise: golden vectors, its distribution, and its independence over positions, seeds and tokens."""

import numpy as np
import pytest
from scipy import stats

from outrider.speculation import noise

SEED = 0x0123456789ABCDEF
POSITIONS = np.array([0, 1, 2, 1000, 2**32 + 5])
TOKENS = np.array([0, 1, 2, 49151, 151935])
KEYS = [
    [3092259374, 3314331723],
    [2915701862, 1379798405],
    [4157483423, 2185022272],
    [991328795, 2760376010],
    [3098690551, 3666852264],
]
# Rows are POSITIONS, columns TOKENS. Every implementation must give these 32-bit words.
BITS = [
    [2238231351, 1620936991, 1773778452, 649660254, 1876804806],
    [564118935, 1245084854, 3323904365, 3760050043, 679103738],
    [475042612, 4076702216, 1072449640, 1563860628, 719359518],
    [430856787, 652002979, 3021378285, 3611382372, 591092814],
    [494309386, 502332289, 3907622390, 1737965845, 3477556578],
]


def test_philox_gives_its_published_answer():
    # Known-answer test of Philox4x32-10 with zero key and zero counter: the first two words.
    assert noise.position_keys(0, np.array([0])).tolist() == [[0x6627E8D5, 0xE169C58D]]


def test_golden_keys_and_bits():
    keys = noise.position_keys(SEED, POSITIONS)
    assert keys.tolist() == KEYS
    assert noise.token_bits(keys[:, None, :], TOKENS[None, :]).tolist() == BITS


def test_torch_gives_the_same_bits():
    torch = pytest.importorskip("torch")
    from services.target.sampling.sampler import token_bits

    keys = torch.from_numpy(noise.position_keys(SEED, POSITIONS).astype(np.int64))
    assert token_bits(keys, torch.from_numpy(TOKENS)).tolist() == BITS


def test_jax_gives_the_same_bits():
    jnp = pytest.importorskip("jax.numpy")
    from services.draft.model.programs.noise import token_bits

    keys = jnp.asarray(noise.position_keys(SEED, POSITIONS))
    assert np.asarray(token_bits(keys, jnp.asarray(TOKENS, dtype=jnp.uint32))).tolist() == BITS


def test_noise_is_gumbel_and_within_its_range():
    sample = noise.gumbel(5, np.arange(200), np.arange(5000)).ravel()
    assert stats.kstest(sample[::10], stats.gumbel_r.cdf).pvalue > 1e-4
    lowest, highest = noise.gumbel_from_bits(np.array([0, 2**32 - 1], dtype=np.uint32))
    assert noise.GUMBEL_MIN <= lowest < sample.min()
    assert sample.max() < highest <= noise.GUMBEL_MAX


def test_no_two_tokens_share_noise_at_a_position():
    keys = noise.position_keys(9, np.array([4]))
    assert len(np.unique(noise.token_bits(keys, np.arange(200_000)))) == 200_000


@pytest.mark.parametrize("axis", ["position", "seed", "token"])
def test_neighbours_are_independent(axis):
    if axis == "seed":
        rows = np.stack([noise.gumbel(seed, np.array([7]), np.arange(4000))[0] for seed in range(50)])
    else:
        rows = noise.gumbel(3, np.arange(50), np.arange(4000))
    rows = rows if axis != "token" else rows.T[:50]
    uniforms = np.exp(-np.exp(-rows.astype(np.float64)))
    correlations = np.corrcoef(uniforms)[np.triu_indices(len(rows), 1)]
    # 1,225 correlations of n independent pairs have standard deviation 1/sqrt(n) each.
    assert np.abs(correlations).max() < 5.0 / np.sqrt(rows.shape[1])


def test_argmax_with_noise_samples_from_the_softmax():
    # A million draws over 16 tokens, with positions and seeds as the only source of randomness.
    probabilities = np.random.default_rng(1).dirichlet(np.full(16, 0.5))
    log_p = np.log(probabilities).astype(np.float32)
    counts = np.zeros(16)
    for seed in range(10):
        draws = np.argmax(noise.gumbel(seed, np.arange(100_000), np.arange(16)) + log_p, axis=1)
        counts += np.bincount(draws, minlength=16)
    assert stats.chisquare(counts, probabilities * counts.sum()).pvalue > 1e-4
