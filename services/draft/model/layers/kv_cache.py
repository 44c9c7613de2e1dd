"""The KV pools of a draft model: arrays that are donated to every step; page ids live on the host alone.

layers     for each layer [slots, 2, kv_heads, head_dim]: keys and values of a slot side by side; behind them, for each
           chained layer but the last [slots, H]: the state that it passes on to the next layer
features   [slots, H]: the state that each row passes on to its children; None for models that pass none on

On several devices each holds the keys and values of its own heads, and its own part of the features if the hidden size
is divisible.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.kernels.base import Backend
from services.draft.kernels.cpu import attention as cpu
from services.draft.model.layers.config import ModelConfig
from services.draft.model.matrices.sharded import ColumnSharded, local_shard


class Pools(NamedTuple):
    """The cached arrays of all sessions."""

    layers: list[jax.Array]
    features: jax.Array | ColumnSharded | None = None


def make_pools(config: ModelConfig, total_pages: int, page_size: int, dtype: Any) -> Pools:
    """Empty pools for `total_pages` pages and the null page."""
    slots = (total_pages + 1) * page_size
    layers = [jnp.zeros((slots, *layer.attention.kv_shape), dtype) for layer in config.layers]
    layers += [jnp.zeros((slots, config.hidden_size), dtype) for _ in range(config.chain_links)]
    return Pools(layers, jnp.zeros((slots, config.hidden_size), dtype) if config.head.keeps_states else None)


def move_rows(pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Copy slots of one pool; all sources are read before any target is written. source, target: [M] int32."""
    return pool.at[target].set(pool[source])


def move_and_write(pool: jax.Array, moves: jax.Array, slots: jax.Array, rows: jax.Array, backend: Backend) -> jax.Array:
    """Copy slots of one pool and write new rows; sources are read before any write.

    One scatter does both, because XLA turns the write of a single row into a slice update and copies the pool for it.
    moves: [2, M] int32, sources and targets; slots: [N] int32; rows: [N, ...], padded with zeros to the width of the
    pool. Targets and slots are distinct, except for padding.
    """
    if missing := pool.shape[-1] - rows.shape[-1]:
        rows = jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, missing),))
    if backend == "cpu":
        return cpu.move_and_write(pool, moves, slots, rows)
    targets = jnp.concatenate([moves[1], slots])
    return pool.at[targets].set(jnp.concatenate([pool[moves[0]], rows]))


def keep_features(
    pool: jax.Array | ColumnSharded, moves: jax.Array, slots: jax.Array, rows: jax.Array, backend: Backend
) -> jax.Array | ColumnSharded:
    """As `move_and_write`, for the pool of features. rows: [N, H]."""
    if not isinstance(pool, ColumnSharded):
        return move_and_write(pool, moves, slots, rows, backend)
    return ColumnSharded(move_and_write(pool.part, moves, slots, local_shard(rows, pool.part.shape[-1]), backend))
