"""Attention that reads keys and values in place, and updates of the KV cache in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from services.draft.kernels.base import Context
from services.draft.kernels.cpu import library

WIDEST = 1024
"""Largest head size, as in csrc/attention.h."""


def cpu_attention(
    q: jax.Array,
    pool: jax.Array,
    context: Context,
    page_size: int,
    *,
    since: jax.Array | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """As of model.layers.backend.attention. q, pool: both float32 or both bfloat16."""
    first = jnp.zeros(0, jnp.int32) if since is None else since
    nothing = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    kernel = library.call("attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    seen: jax.Array = kernel(
        q, pool, context.pages, context.visible, first, context.scratch_slots, context.scratch_mask, nothing,
        page_size=np.int32(page_size), softcap=np.float32(softcap or 0.0),
    )  # fmt: skip
    return seen


def move_and_write(pool: jax.Array, moves: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """As of kv_cache.move_and_write, except that slot 0, which is padding, is not written."""
    kernel = library.call("keep", jax.ShapeDtypeStruct(pool.shape, pool.dtype), aliases={0: 0})
    changed: jax.Array = kernel(pool, moves, slots, rows.astype(pool.dtype))
    return changed
