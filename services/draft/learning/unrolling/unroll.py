"""Training-time unrolling: the draft model as the draft service runs it, on the target's states first, then on its own.

    prefix    every place of a pack: the target's states; keys and values for all later rows of its record
    step 0    trained row r: the target's state r beside token r + 1, at position r, predicts token r + 2
    step k    the same row, k tokens further: its own state of step k - 1 beside token r + 1 + k, at position r + k;
              attends to the prefix up to r, and to its own rows of steps 1 .. k

The draft service computes the same when it extends the prefix by true features, and expands a node, its child, and so
on along the text ("training-time test", EAGLE-3). The tokens on the way are those of the text.

A decoder without features has a row for every token: trained row r predicts token r + 1, and further steps would add
nothing.

Later steps may use fewer rows than the first: the first ones of each pack.

Legend of shapes: B packs, L places, R trained rows, H hidden size, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.learning.records.batches import Batch
from services.draft.model.layers.attention import latent_output, project, project_latent
from services.draft.model.layers.config import LatentAttention, Layer, ModelConfig
from services.draft.model.layers.decoder import layer_input, layer_output
from services.draft.model.layers.heads import Inputs
from services.draft.model.matrices.mixed_precision import MixedPrecisionWeight, bf16_matmul
from services.draft.model.matrices.products import linear
from services.draft.model.params import Params


class UnrollKV(NamedTuple):
    """Keys and values of a layer: of the prefix [B, 2, G, L, D], and of each unroll step [B, 2, G, R, D]."""

    prefix: jax.Array
    steps: tuple[jax.Array, ...] = ()

    def further(self, kv: jax.Array, count: int) -> UnrollKV:
        """With one more step, for the first `count` rows alone."""
        return UnrollKV(self.prefix, (*(past[:, :, :, :count] for past in self.steps), kv))


class UnrollStep(NamedTuple):
    """One unroll step. state: [B, R, H], input of the head; place: [B, R], whose target distribution it predicts."""

    state: jax.Array
    place: jax.Array


def unroll(
    model: ModelConfig, params: Params, embed: jax.Array, feature: jax.Array | None, batch: Batch, counts: Sequence[int]
) -> Iterator[UnrollStep]:
    """The unroll steps, one after the other. embed: [V, H]; feature: [B, L, H], made from the target's states; None for
    models without features.

    counts: trained rows of each pack in each step, the first ones; non-increasing
    """
    rows = batch.rows[:, : counts[0]]
    sees = visible_places(batch, rows)
    handed, state, kv_cache = prefix(model, params, embed, feature, batch, rows, sees)
    yield UnrollStep(state, rows + model.head.uses_features)
    assert handed is not None or len(counts) == 1, "a feature-based head passes a state on"
    for step, count in enumerate(counts[1:], start=1):
        assert handed is not None
        rows, sees, handed = rows[:, :count], sees[:, :count], handed[:, :count]
        place = rows + step
        token = jnp.take_along_axis(batch.inputs, place, axis=1)
        position = jnp.take_along_axis(batch.positions, rows, axis=1) + step
        x, beside = model.head.join(params, Inputs(embed[token].astype(handed.dtype), position, handed))
        for i, (layer, own) in enumerate(zip(model.layers, params["layers"], strict=True)):
            next_to = beside if layer.beside else None
            inner, residual = layer_input(layer, own, x, next_to)
            q, kv = project_heads(layer, own, inner, position)
            kv_cache[i] = kv_cache[i].further(kv, count)
            x = layer_output(
                layer, own, residual, attention_output(layer, own, attend(q, kv_cache[i], sees, _mixed(own)))
            )
        state, handed = model.head.finish(params, x)
        yield UnrollStep(state, place + 1)


def visible_places(batch: Batch, rows: jax.Array) -> jax.Array:
    """The places of the prefix that rows attend to: those of their record up to their own. rows: [B, R].

    Returns [B, R, L] bool.
    """
    places = jnp.arange(batch.segments.shape[1])
    segment = jnp.take_along_axis(batch.segments, rows, axis=1)
    same = segment[:, :, None] == batch.segments[:, None, :]
    visible: jax.Array = same & (places <= rows[:, :, None])
    return visible


def prefix(
    model: ModelConfig,
    params: Params,
    embed: jax.Array,
    feature: jax.Array | None,
    batch: Batch,
    rows: jax.Array,
    sees: jax.Array,
) -> tuple[jax.Array | None, jax.Array, list[UnrollKV]]:
    """States that trained rows pass on, their output states, and the prefix's keys and values.

    All layers but the last are computed at every place; the last one only at trained rows.
    """
    places = batch.segments.shape[1]
    embedding = embed[batch.inputs[:, :places]].astype(jnp.float32)
    x, beside = model.head.join(params, Inputs(embedding, batch.positions, feature))
    kv_cache: list[UnrollKV] = []
    everywhere = jnp.broadcast_to(jnp.arange(places), batch.segments.shape)
    for i, (layer, own) in enumerate(zip(model.layers, params["layers"], strict=True)):
        last = i == len(model.layers) - 1
        inner, residual = layer_input(layer, own, x, beside if layer.beside else None)
        q, kv = project_heads(layer, own, inner, batch.positions)
        kv_cache.append(UnrollKV(kv))
        if last:
            q, residual = jnp.take_along_axis(q, rows[:, None, None, :, None], axis=3), take(residual, rows)
        seen = attend(q, kv_cache[-1], sees if last else visible_places(batch, everywhere), _mixed(own))
        x = layer_output(layer, own, residual, attention_output(layer, own, seen))
    state, handed = model.head.finish(params, x)
    return handed, state, kv_cache


def take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of packs; indices behind the end give the last row. x: [B, L, N]; rows: [B, R]. Returns [B, R, N]."""
    return jnp.take_along_axis(x, rows[:, :, None], axis=1, mode="clip")


def project_heads(
    layer: Layer, params: dict[str, Any], inner: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of N rows, queries [B, G, heads / G, N, D], and keys and values [B, 2, G, N, D]."""
    a = layer.attention
    if isinstance(a, LatentAttention):  # one head of keys, which are the values too
        q, row = project_latent(params, a, inner, positions)
        return q.transpose(0, 2, 1, 3)[:, None], jnp.stack([row, row], axis=1)[:, :, None]
    assert not a.gated
    assert (a.window, a.first, a.sinks, a.softcap) == (None, 0, False, None)
    q, kv, _ = project(params, a, inner, positions, layer.epsilon)
    q = q.reshape(*q.shape[:2], a.kv_heads, -1, a.head_dim).transpose(0, 2, 3, 1, 4)
    return q, kv.transpose(0, 2, 3, 1, 4)


def attention_output(layer: Layer, params: dict[str, Any], seen: jax.Array) -> jax.Array:
    """The output of attention. seen: by `attend`."""
    a = layer.attention
    if isinstance(a, LatentAttention):
        return latent_output(params, a, seen.reshape(*seen.shape[:2], a.heads, -1))
    return linear(seen, params, "output")


def _mixed(params: dict[str, Any]) -> bool:
    return isinstance(params["output"], MixedPrecisionWeight)


def attend(q: jax.Array, kv_cache: UnrollKV, sees: jax.Array, mixed_precision: bool) -> jax.Array:
    """Attention over the prefix and the row's own unroll steps. q: [B, G, J, N, D]; sees: [B, N, L].

    mixed_precision: multiply in bfloat16. Returns [B, N, G * J * D].
    """
    multiply = bf16_matmul if mixed_precision else jnp.matmul
    packs, groups, shared, rows, dim = q.shape
    keys, values = kv_cache.prefix[:, 0], kv_cache.prefix[:, 1]  # [B, G, L, D]
    q = q / dim**0.5
    scores = multiply(q.reshape(packs, groups, shared * rows, dim), keys.swapaxes(2, 3))
    scores = jnp.where(sees[:, None, None], scores.reshape(packs, groups, shared, rows, -1), -1e30)
    own = [jnp.sum(q * kv[:, 0, :, None], axis=-1) for kv in kv_cache.steps]  # [B, G, J, N]
    best = scores.max(axis=-1)
    for score in own:
        best = jnp.maximum(best, score)
    best = jax.lax.stop_gradient(best)
    shares = jnp.exp(scores - best[..., None])  # [B, G, J, N, L]
    total = shares.sum(axis=-1)
    seen = multiply(shares.reshape(packs, groups, shared * rows, -1), values).reshape(q.shape)
    for score, kv in zip(own, kv_cache.steps, strict=True):
        share = jnp.exp(score - best)
        total = total + share
        seen = seen + share[..., None] * kv[:, 1, :, None]
    seen = seen / total[..., None]
    return seen.transpose(0, 3, 1, 2, 4).reshape(packs, rows, groups * shared * dim)
