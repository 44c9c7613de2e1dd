"""The decoder as pure functions: rows of tokens in, states out, keys and values written into the pools.

Legend of shapes: S sessions, Q rows a session, H hidden size, D head size, V vocabulary, W width of a feature.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.kernels.attention import Context, attention
from services.draft.kv_cache import Pools, move_and_write
from services.draft.model.config import Attention, Layer, ModelConfig
from services.draft.model.heads import Inputs, Params, rms_norm


class Features(NamedTuple):
    """The features of a step's rows. Where `given`, it is the row's own in `rows`; else it is read from the pool.

    rows: [S, Q, W]; given: [S, Q] bool; sources: [S, Q] int32, slots of the parents' rows
    """

    rows: jax.Array
    given: jax.Array
    sources: jax.Array


class Rows(NamedTuple):
    """The rows of a step, [S, Q] int32 each. slots: where a row's keys and values go; padding goes to slot 0."""

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    features: Features | None = None


def hidden_states(
    params: Params,
    config: ModelConfig,
    pools: Pools,
    rows: Rows,
    context: Context,
    moves: jax.Array,
    page_size: int,
) -> tuple[jax.Array, Pools]:
    """The states that the rows' logits come from, [S, Q, H], and the pools with what the rows leave there.

    moves: slots to copy before anything else, [2, M] int32, sources and targets. Features are read from the slots as
    they were before the moves.
    """
    embedding = params["embed"][rows.tokens] if "embed" in params else params["head"].T[rows.tokens]
    x, beside = config.head.join(params, _inputs(embedding, rows, pools))
    written: list[jax.Array] = []
    plain = rows._replace(features=None)
    for description, layer, pool in zip(config.layers, params["layers"], pools.layers, strict=True):
        next_to = beside if description.beside else None
        x, filled = _layer(description, page_size, layer, x, next_to, pool, plain, context, moves)
        written.append(filled)
    state, handed = config.head.finish(params, x)
    kept = pools.features
    if kept is not None:
        assert handed is not None, "a fed head hands a state on"
        kept = move_and_write(kept, moves, rows.slots.reshape(-1), handed.reshape(-1, handed.shape[-1]))
    return state, Pools(written, kept)


def _inputs(embedding: jax.Array, rows: Rows, pools: Pools) -> Inputs:
    if rows.features is None:
        return Inputs(embedding, rows.positions)
    assert pools.features is not None, "a fed head has a pool of features"
    given = rows.features.given
    own = pools.features[rows.features.sources]
    feature = jnp.where(given[..., None], rows.features.rows.astype(own.dtype), own)
    return Inputs(embedding, rows.positions, feature, given)


@partial(jax.jit, static_argnums=(0, 1))
def _layer(
    description: Layer,
    page_size: int,
    layer: dict[str, jax.Array],
    x: jax.Array,
    beside: jax.Array | None,
    pool: jax.Array,
    rows: Rows,
    context: Context,
    moves: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One layer on states x [S, Q, H]. Jitted by itself so that equal ones are traced once; XLA inlines it.

    A scan over stacked weights would compile faster, but XLA's CPU backend copies every layer's weights out of the
    stack first, which costs a third at one row.
    """
    epsilon = description.epsilon
    inner = rms_norm(x, layer["attention_norm"], epsilon) if description.input_norm else x
    residual = inner if description.residual_after_norm else x
    if beside is not None:
        inner = jnp.concatenate([rms_norm(beside, layer["beside_norm"], epsilon), inner], axis=-1)
    q, kv = _project(layer, description.attention, inner, rows.positions, epsilon)
    filled = move_and_write(pool, moves, rows.slots.reshape(-1), kv.reshape(-1, *pool.shape[1:]))
    seen = attention(q, filled, context, page_size).reshape(*x.shape[:2], -1)
    x = residual + _linear(seen, layer, "output")
    x = x + _mlp(rms_norm(x, layer["mlp_norm"], epsilon), layer)
    return x, filled


def head(params: Params, x: jax.Array, vocab_limit: int) -> jax.Array:
    """Logits of states, [..., H] to [..., V] float32; ids from `vocab_limit` on are padding and never likely."""
    logits = jnp.einsum("...h,hv->...v", x, params["head"], preferred_element_type=jnp.float32)
    ids = params.get("ids")
    if ids is None:
        if vocab_limit >= logits.shape[-1]:
            return logits
        ids = jnp.arange(logits.shape[-1])
    return jnp.where(ids < vocab_limit, logits, -1e30)


def _linear(x: jax.Array, layer: dict[str, Any], name: str) -> jax.Array:
    y = jnp.einsum("...i,io->...o", x, layer[name])
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


def _project(
    layer: dict[str, Any], description: Attention, x: jax.Array, positions: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """Queries [S, Q, heads, D], and keys and values [S, Q, 2, kv_heads, D]."""
    heads, dim = description.heads, description.head_dim
    qkv = _linear(x, layer, "qkv").reshape(*x.shape[:2], -1, dim)
    q, k, v = jnp.split(qkv, (heads, heads + description.kv_heads), axis=2)
    if description.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], epsilon), rms_norm(k, layer["k_norm"], epsilon)
    # Angles are computed and not looked up, so that no position lies beyond a table.
    angles = positions[..., None].astype(jnp.float32) * description.rope.inverse_frequencies(dim)
    rotation = (jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None])  # [S, Q, 1, D / 2]
    return _rotate(q, rotation), jnp.stack([_rotate(k, rotation), v], axis=2)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (i, i + D / 2) of each head. x: [S, Q, heads, D]."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _mlp(x: jax.Array, layer: dict[str, Any]) -> jax.Array:
    gate, up = jnp.split(_linear(x, layer, "gate_up"), 2, axis=-1)
    return _linear(jax.nn.silu(gate) * up, layer, "down")
