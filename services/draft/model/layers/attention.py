"""Attention of a layer: projections to queries, keys and values, the KV cache, and the output projection.

Legend of shapes: S sessions, Q rows a session, I size of a state, D head size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.kernels.base import Context, Paging
from services.draft.model.layers.backend import attention
from services.draft.model.layers.config import Attention, LatentAttention
from services.draft.model.layers.heads import rms_norm
from services.draft.model.layers.kv_cache import move_and_write
from services.draft.model.layers.rope import Rope
from services.draft.model.matrices.products import linear


class Step(NamedTuple):
    """The rows of a step, S x Q, for attention of any kind.

    positions: [S, Q]; slots: [S, Q], where a row's keys and values are written; moves: [2, M], slots to copy first
    """

    positions: jax.Array
    slots: jax.Array
    context: Context
    moves: jax.Array


# Latent attention's own norms have this epsilon.
_LATENT_EPSILON = 1e-6


def attend(
    description: Attention | LatentAttention,
    paging: Paging,
    layer: dict[str, Any],
    x: jax.Array,
    pool: jax.Array,
    step: Step,
    epsilon: float,
) -> tuple[jax.Array, jax.Array]:
    """The output of attention for states x [S, Q, I], and the pool with the rows' keys and values.

    epsilon: of the norms of queries and keys.
    """
    if isinstance(description, LatentAttention):
        return _attend_latent(description, paging, layer, x, pool, step)
    q, kv, gate = project(layer, description, x, step.positions, epsilon)
    filled = move_and_write(pool, step.moves, step.slots.reshape(-1), kv.reshape(-1, *kv.shape[2:]), paging.backend)
    since = first_seen(description, step.positions)
    seen = attention(
        q, filled, step.context, paging, since=since, sinks=layer.get("sinks"), softcap=description.softcap
    )
    if gate is not None:
        seen = seen * jax.nn.sigmoid(gate)
    return linear(seen.reshape(*x.shape[:2], -1), layer, "output"), filled


def first_seen(description: Attention, positions: jax.Array) -> jax.Array | None:
    """The first row of the prefix KV that each row attends to, [S, Q]; None without a limit."""
    if description.window is None:
        return jnp.full_like(positions, description.first) if description.first else None
    return jnp.maximum(positions - description.window + 1, description.first)


def project(
    layer: dict[str, Any], description: Attention, x: jax.Array, positions: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Queries [S, Q, heads, D], keys and values [S, Q, 2, kv_heads, D], and the gate [S, Q, heads, D] or None."""
    heads, kv_heads, dim = description.heads, description.kv_heads, description.head_dim
    qkv = linear(x, layer, "qkv").reshape(*x.shape[:2], -1, dim)
    q, k, v, gate = jnp.split(qkv, (heads, heads + kv_heads, heads + 2 * kv_heads), axis=2)
    if description.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], epsilon), rms_norm(k, layer["k_norm"], epsilon)
    if description.rope is not None:
        cos_sin = _angles(description.rope, dim, positions)
        q, k = _rotate(q, cos_sin), _rotate(k, cos_sin)
    q = _scaled(q, description.scale, dim)
    return q, jnp.stack([k, v], axis=2), gate if description.gated else None


def _attend_latent(
    description: LatentAttention, paging: Paging, layer: dict[str, Any], x: jax.Array, pool: jax.Array, step: Step
) -> tuple[jax.Array, jax.Array]:
    """Attention in the latent space, where all heads read the same rows; values are projected back afterwards."""
    q, row = project_latent(layer, description, x, step.positions)
    row = row.reshape(-1, 1, 1, row.shape[-1])
    filled = move_and_write(pool, step.moves, step.slots.reshape(-1), row, paging.backend)
    seen = attention(q, filled, step.context, paging)
    return latent_output(layer, description, seen), filled


def project_latent(
    layer: dict[str, Any], description: LatentAttention, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Queries [S, Q, heads, D] and rows of the cache [S, Q, D], which are keys and values of all heads."""
    inner = x
    if description.query_rank:
        inner = rms_norm(linear(x, layer, "query_down"), layer["query_norm"], _LATENT_EPSILON)
    q = linear(inner, layer, "query").reshape(*x.shape[:2], description.heads, -1)
    plain, turning = jnp.split(q, (description.plain_dim,), axis=-1)
    latent, key = jnp.split(linear(x, layer, "latent"), (description.rank,), axis=-1)
    latent = rms_norm(latent, layer["latent_norm"], _LATENT_EPSILON)
    cos_sin = _angles(description.rope, description.rotary_dim, positions)
    row = jnp.concatenate([latent, _rotate(key[:, :, None], cos_sin)[:, :, 0]], axis=-1)
    q = jnp.concatenate([jnp.einsum("sqhp,hpr->sqhr", plain, layer["keys"]), _rotate(turning, cos_sin)], axis=-1)
    return _scaled(q, description.scale, q.shape[-1]), row


def latent_output(layer: dict[str, Any], description: LatentAttention, seen: jax.Array) -> jax.Array:
    """The output of attention, [S, Q, H]. seen: what each head has read of the rows, [S, Q, heads, D]."""
    values = jnp.einsum("sqhr,hrv->sqhv", seen[..., : description.rank], layer["values"])
    return linear(values.reshape(*seen.shape[:2], -1), layer, "output")


def _scaled(q: jax.Array, scale: float | None, dim: int) -> jax.Array:
    """Scale queries so that attention, which multiplies scores by 1 / sqrt(dim), multiplies them by `scale`."""
    return q if scale is None else q * (scale * math.sqrt(dim))


def _angles(rope: Rope, dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, [S, Q, 1, rotated / 2]. Computed instead of looked up, so that no position exceeds a table."""
    angles = (positions[..., None].astype(jnp.float32) * rope.inverse_frequencies(dim))[:, :, None]
    return jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude


def _rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (i, i + half) of the first 2 * half dimensions of each head. x: [S, Q, heads, D]."""
    cos, sin = cos_sin
    half = cos.shape[-1]
    a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)
