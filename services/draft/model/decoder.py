"""The decoder as pure functions: rows of tokens in, logits out, keys and values written into the pools.

Legend of shapes: S sessions, Q rows a session, H hidden size, D head size, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.kernels.attention import Context, attention
from services.draft.kv_cache import Pools, move_and_write
from services.draft.model.config import ModelConfig
from services.draft.model.weights import Params


class Rows(NamedTuple):
    """The rows of a step, [S, Q] int32 each. slots: where a row's keys and values go; padding goes to slot 0."""

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array


def hidden_states(
    params: Params,
    config: ModelConfig,
    pools: Pools,
    rows: Rows,
    context: Context,
    moves: jax.Array,
    page_size: int,
) -> tuple[jax.Array, Pools]:
    """Final-norm states of the rows, [S, Q, H], and the pools with the rows' keys and values.

    moves: slots to copy before anything else, [2, M] int32, sources and targets.
    """
    x = params["embed"][rows.tokens] if "embed" in params else params["head"].T[rows.tokens]
    angles = rows.positions[..., None].astype(jnp.float32) * config.rope.inverse_frequencies(config.head_dim)
    rotation = (jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None])  # [S, Q, 1, D / 2]
    written: Pools = []
    for layer, pool in zip(params["layers"], pools, strict=True):
        x, filled = _layer(config, page_size, layer, x, pool, rows.slots, rotation, context, moves)
        written.append(filled)
    return _norm(x, params["norm"], config), written


@partial(jax.jit, static_argnums=(0, 1))
def _layer(
    config: ModelConfig,
    page_size: int,
    layer: dict[str, jax.Array],
    x: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    context: Context,
    moves: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One layer on states x [S, Q, H]. Jitted by itself so that it is traced once for all layers; XLA inlines it.

    A scan over stacked weights would compile faster, but XLA's CPU backend copies every layer's weights out of the
    stack first, which costs a third at one row.
    """
    q, kv = _project(layer, config, _norm(x, layer["attention_norm"], config), rotation)
    filled = move_and_write(pool, moves, slots.reshape(-1), kv.reshape(-1, *pool.shape[1:]))
    seen = attention(q, filled, context, page_size).reshape(*x.shape[:2], -1)
    x = x + _linear(seen, layer, "output")
    x = x + _mlp(_norm(x, layer["mlp_norm"], config), layer)
    return x, filled


def head(params: Params, x: jax.Array, vocab_limit: int) -> jax.Array:
    """Logits of states, [..., H] to [..., V] float32; ids from `vocab_limit` on are padding and never likely."""
    logits = jnp.einsum("...h,hv->...v", x, params["head"], preferred_element_type=jnp.float32)
    if vocab_limit == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_limit, logits, -1e30)


def _linear(x: jax.Array, layer: dict[str, Any], name: str) -> jax.Array:
    y = jnp.einsum("...i,io->...o", x, layer[name])
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


def _norm(x: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_epsilon)
    return (wide * scale).astype(x.dtype) * weight


def _project(
    layer: dict[str, Any], config: ModelConfig, x: jax.Array, rotation: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Queries [S, Q, heads, D], and keys and values [S, Q, 2, kv_heads, D]."""
    qkv = _linear(x, layer, "qkv").reshape(*x.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(qkv, (config.heads, config.heads + config.kv_heads), axis=2)
    if config.qk_norm:
        q, k = _norm(q, layer["q_norm"], config), _norm(k, layer["k_norm"], config)
    return _rotate(q, rotation), jnp.stack([_rotate(k, rotation), v], axis=2)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (i, i + D / 2) of each head. x: [S, Q, heads, D]."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _mlp(x: jax.Array, layer: dict[str, Any]) -> jax.Array:
    gate, up = jnp.split(_linear(x, layer, "gate_up"), 2, axis=-1)
    return _linear(jax.nn.silu(gate) * up, layer, "down")
