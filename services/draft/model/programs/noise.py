"""Coupled noise in JAX: the same bits as `outrider.speculation.noise`, whose golden vectors hold for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from outrider.speculation.noise import MIX_A, MIX_B, TOKEN_STEP


def _mix(x: jax.Array) -> jax.Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(MIX_A)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(MIX_B)
    return x ^ (x >> 16)


def token_bits(keys: jax.Array, tokens: jax.Array) -> jax.Array:
    """Bits of every token under every key. keys: [..., 2] uint32; tokens: [V] uint32. Returns [..., V] uint32."""
    x = _mix(tokens * jnp.uint32(TOKEN_STEP) ^ keys[..., 0, None])
    return _mix(x ^ keys[..., 1, None])


def gumbel_from_bits(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise of random bits, float32, accurate over the whole range.

    u = (bits + 0.5) / 2^32. The tokens that win have u close to 1, where float32 would round u itself: there the
    distance to 1 is formed from the inverted bits instead.
    """
    scale = jnp.float32(2.0**-32)
    u = (bits.astype(jnp.float32) + 0.5) * scale
    rest = ((~bits).astype(jnp.float32) + 0.5) * scale
    upper = bits >= jnp.uint32(1 << 31)
    log_u = jnp.where(upper, jnp.log1p(-jnp.where(upper, rest, 0.5)), jnp.log(u))
    return -jnp.log(-log_u)
