"""The pools of a draft model: arrays that are donated to every step; page ids live on the host alone.

layers     of each layer [slots, 2, kv_heads, head_dim]: keys and values of a slot side by side
features   [slots, H]: the state that each row hands on to its children; None for models that are not fed

Of several devices each has its own heads' keys and values, and its own numbers of the features, if they divide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.kernels.base import Backend
from services.draft.kernels.cpu import attention as cpu
from services.draft.model.layers.config import ModelConfig
from services.draft.model.matrices.parts import Joined, own_part


class Pools(NamedTuple):
    """All that a session's rows leave behind."""

    layers: list[jax.Array]
    features: jax.Array | Joined | None = None


def make_pools(config: ModelConfig, total_pages: int, page_size: int, dtype: Any) -> Pools:
    """Empty pools for `total_pages` pages and the null page."""
    slots = (total_pages + 1) * page_size
    layers = [jnp.zeros((slots, *layer.attention.kv_shape), dtype) for layer in config.layers]
    return Pools(layers, jnp.zeros((slots, config.hidden_size), dtype) if config.head.fed else None)


def move_rows(pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Copy slots of one pool: all are read before any is written. source, target: [M] int32."""
    return pool.at[target].set(pool[source])


def move_and_write(pool: jax.Array, moves: jax.Array, slots: jax.Array, rows: jax.Array, backend: Backend) -> jax.Array:
    """Copy slots of one pool and write new rows; sources are read as they were before.

    One scatter does both: the write of a single row by itself becomes a slice update, for which XLA copies the pool.
    moves: [2, M] int32, sources and targets; slots: [N] int32; rows: [N, ...], perhaps narrower than the pool's, which
    zeros fill up. Targets and slots differ, but for padding.
    """
    if missing := pool.shape[-1] - rows.shape[-1]:
        rows = jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, missing),))
    if backend == "cpu":
        return cpu.move_and_write(pool, moves, slots, rows)
    targets = jnp.concatenate([moves[1], slots])
    return pool.at[targets].set(jnp.concatenate([pool[moves[0]], rows]))


def keep_features(
    pool: jax.Array | Joined, moves: jax.Array, slots: jax.Array, rows: jax.Array, backend: Backend
) -> jax.Array | Joined:
    """As `move_and_write` for the pool of features. rows: [N, H]."""
    if not isinstance(pool, Joined):
        return move_and_write(pool, moves, slots, rows, backend)
    return Joined(move_and_write(pool.part, moves, slots, own_part(rows, pool.part.shape[-1]), backend))
