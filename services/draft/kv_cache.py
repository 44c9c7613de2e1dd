"""The KV pool of the draft model: one array a layer, donated to every step; page ids live on the host alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from services.draft.model.config import ModelConfig

# One array a layer, [slots, 2, kv_heads, head_dim]: keys and values of a slot side by side.
Pools = list[jax.Array]


def make_pools(config: ModelConfig, total_pages: int, page_size: int, dtype: Any) -> Pools:
    """Empty pools for `total_pages` pages and the null page."""
    shape = ((total_pages + 1) * page_size, 2, config.kv_heads, config.head_dim)
    return [jnp.zeros(shape, dtype) for _ in range(config.layers)]


def move_rows(pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Copy slots of one layer: all are read before any is written. source, target: [M] int32."""
    return pool.at[target].set(pool[source])


def move_and_write(pool: jax.Array, moves: jax.Array, slots: jax.Array, kv: jax.Array) -> jax.Array:
    """Copy slots of one layer and write new rows; sources are read as they were before.

    One scatter does both: the write of a single row by itself becomes a slice update, for which XLA copies the pool.
    moves: [2, M] int32, sources and targets; slots: [N] int32; kv: [N, 2, kv_heads, D]. Targets and slots differ, but
    for padding.
    """
    targets = jnp.concatenate([moves[1], slots])
    return pool.at[targets].set(jnp.concatenate([pool[moves[0]], kv]))
