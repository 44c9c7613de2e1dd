"""Coupled sampling noise in JAX: the same bits as `outrider.speculation.noise`, tested with its golden vectors."""

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
    """Random bits by key and token. keys: [..., 2] uint32; tokens: [V] uint32. Returns [..., V] uint32."""
    x = _mix(tokens * jnp.uint32(TOKEN_STEP) ^ keys[..., 0, None])
    return _mix(x ^ keys[..., 1, None])


def gumbel_from_bits(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise from random bits, float32, accurate over the whole range.

    u = (bits + 0.5) / 2^32. The largest noise has u close to 1, where float32 would round u itself: there the distance
    to 1 is computed from the inverted bits instead.
    """
    scale = jnp.float32(2.0**-32)
    u = (bits.astype(jnp.float32) + 0.5) * scale
    rest = ((~bits).astype(jnp.float32) + 0.5) * scale
    upper = bits >= jnp.uint32(1 << 31)
    log_u = jnp.where(upper, jnp.log1p(-jnp.where(upper, rest, 0.5)), jnp.log(u))
    return -jnp.log(-log_u)
