"""The plain twin of all attention kernels, in jax.numpy.

Keys and values are gathered through the page table on any device. Softmax runs block by block with running maxima, so
that work grows with the longest context of the batch instead of the table's width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from services.draft.kernels.base import Context

_BLOCK_TOKENS = 256


class _Running(NamedTuple):
    """Online softmax over the keys so far; heads are [kv head, query heads a kv head]."""

    maximum: jax.Array  # [S, K, G, Q]
    total: jax.Array  # [S, K, G, Q]
    output: jax.Array  # [S, K, G, Q, D]


def plain_attention(
    q: jax.Array,
    pool: jax.Array,
    context: Context,
    page_size: int,
    *,
    since: jax.Array | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """As of model.layers.backend.attention."""
    sessions, rows, heads, dim = q.shape
    kv_heads = pool.shape[2]
    grouped = (q * dim**-0.5).reshape(sessions, rows, kv_heads, heads // kv_heads, dim)
    shape = (sessions, kv_heads, heads // kv_heads, rows)
    running = _Running(jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, dim)))
    if sinks is not None:
        scores = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
        running = running._replace(maximum=jnp.broadcast_to(scores, shape), total=jnp.ones(shape))
    running = _attend(running, grouped, pool[context.scratch_slots], context.scratch_mask, softcap)

    pages_a_block = min(max(_BLOCK_TOKENS // page_size, 1), context.pages.shape[1])
    block = pages_a_block * page_size

    def body(i: jax.Array, running: _Running) -> _Running:
        # The slice may move the last block back; its positions are then moved back, too.
        first = jnp.minimum(i * pages_a_block, context.pages.shape[1] - pages_a_block)
        pages = lax.dynamic_slice_in_dim(context.pages, first, pages_a_block, axis=1)
        slots = (pages[:, :, None] * page_size + jnp.arange(page_size)).reshape(sessions, block)
        positions = first * page_size + jnp.arange(block)
        fresh = positions >= i * block
        mask = (positions < context.visible[:, :, None]) & fresh  # [S, Q, block]
        if since is not None:
            mask &= positions >= since[:, :, None]
        return _attend(running, grouped, pool[slots], mask, softcap)

    blocks = (jnp.max(context.visible) + block - 1) // block
    running = lax.fori_loop(0, blocks, body, running)
    output: jax.Array = running.output / jnp.maximum(running.total, 1e-30)[..., None]
    return output.transpose(0, 3, 1, 2, 4).reshape(sessions, rows, heads, dim).astype(q.dtype)


def _attend(running: _Running, q: jax.Array, kv: jax.Array, mask: jax.Array, softcap: float | None) -> _Running:
    """Accumulate a block of keys. q: [S, Q, K, G, D]; kv: [S, B, 2 or 1, K, D]; mask: [S, Q, B]."""
    scores = jnp.einsum("sqkgd,sbkd->skgqb", q, kv[:, :, 0], preferred_element_type=jnp.float32)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    mask = mask[:, None, None]  # [S, 1, 1, Q, B]
    maximum = jnp.maximum(running.maximum, jnp.where(mask, scores, -1e30).max(axis=-1))
    p = jnp.where(mask, jnp.exp(scores - maximum[..., None]), 0.0)
    decay = jnp.exp(running.maximum - maximum)
    # Slots that no row sees may hold NaN, and 0 * NaN is NaN.
    seen = jnp.where(mask.any(axis=3)[:, 0, 0, :, None, None], kv[:, :, -1], 0)
    values = jnp.einsum("skgqb,sbkd->skgqd", p.astype(kv.dtype), seen, preferred_element_type=jnp.float32)
    return _Running(maximum, running.total * decay + p.sum(axis=-1), running.output * decay[..., None] + values)
