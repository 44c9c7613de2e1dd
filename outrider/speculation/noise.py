"""Coupled noise: a pure function of (seed, position, token) with the same bits in every service.

Gumbel-max sampling takes the token argmax_v(log p(v) + g(seed, position, v)). A drafter that ranks tokens by the same g
proposes the target's own sample if its distribution is close ("Gumbel-max coupling", Daliri et al., arXiv 2408.07978).

    (seed, position)  -- Philox4x32-10 on the host -->  key: two 32-bit words
    (key, token)      -- 32-bit integer mixing on the device -->  32 random bits
    bits              -- u = (bits + 0.5) / 2^32, g = -ln(-ln u) -->  float32 in [-3.14, 22.9]

This module is the NumPy implementation. PyTorch, JAX and C++ implement `token_bits` with their own integer operations;
tests compare their bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U32 = np.uint32
U64 = np.uint64

_PHILOX_ROUNDS = 10
_PHILOX_M0, _PHILOX_M1 = U64(0xD2511F53), U64(0xCD9E8D57)
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
_LOW32 = U64(0xFFFFFFFF)
_SHIFT32 = U64(32)

# Constants of the token mixer, shared by all implementations: two passes of a 32-bit finalizer ("lowbias32", found by
# hash-prospector), each after one key word is mixed in; a bijection of the token for every key.
TOKEN_STEP = 0x9E3779B1
MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B

# Range of the noise: a token whose log-probability is below the best one by more than the range is never sampled.
GUMBEL_MIN = -3.1366
GUMBEL_MAX = 22.8741

_NO_TOKEN = 0xFFFFFFFF  # larger than any token id


def position_keys(seed: int, positions: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Keys of absolute positions for a seed, by Philox4x32-10 (Salmon et al., SC 2011).

    positions: [n] non-negative. Returns [n, 2] uint32.
    """
    n = np.asarray(positions).astype(U64)
    counter = [n & _LOW32, n >> _SHIFT32, np.zeros_like(n), np.zeros_like(n)]
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_PHILOX_ROUNDS):
        product0, product1 = counter[0] * _PHILOX_M0, counter[2] * _PHILOX_M1
        counter = [
            (product1 >> _SHIFT32) ^ counter[1] ^ U64(key0),
            product1 & _LOW32,
            (product0 >> _SHIFT32) ^ counter[3] ^ U64(key1),
            product0 & _LOW32,
        ]
        key0, key1 = (key0 + _PHILOX_W0) & 0xFFFFFFFF, (key1 + _PHILOX_W1) & 0xFFFFFFFF
    return np.stack([counter[0], counter[1]], axis=-1).astype(U32)


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = x ^ (x >> U32(16))
    x = x * U32(MIX_A)
    x = x ^ (x >> U32(15))
    x = x * U32(MIX_B)
    return x ^ (x >> U32(16))


def token_bits(keys: NDArray[np.uint32], tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Random bits of tokens. keys: [..., 2]; tokens broadcasts against keys[..., 0]. Returns uint32."""
    keys = np.asarray(keys, dtype=U32)
    x = _mix(np.asarray(tokens).astype(U32) * U32(TOKEN_STEP) ^ keys[..., 0])
    return _mix(x ^ keys[..., 1])


def coins(seed: int, positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1) for positions, independent of the tokens' noise. positions: [n]. Returns [n]."""
    return (token_bits(position_keys(seed, positions), np.array(_NO_TOKEN)).astype(np.float64) + 0.5) * 2.0**-32


def gumbel_from_bits(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Standard Gumbel noise from random bits, computed in float64 and rounded to float32."""
    u = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log(u))).astype(np.float32)


def gumbel(seed: int, positions: NDArray[np.integer], tokens: NDArray[np.integer]) -> NDArray[np.float32]:
    """Noise of every (position, token) pair. positions: [n]; tokens: [v]. Returns [n, v] float32."""
    keys = position_keys(seed, positions)
    return gumbel_from_bits(token_bits(keys[:, None, :], np.asarray(tokens)[None, :]))
