"""The draft as it will be used: on the target's states first, then on its own, several tokens ahead.

    trunk     every place of a pack: the target's states, keys and values for all later rows of its record
    ahead 0   learnt row r: the target's state r beside token r + 1, at position r, says token r + 2
    ahead k   the same row, k tokens further: its own state of ahead k - 1 beside token r + 1 + k, at position r + k;
              sees the trunk's rows up to r, and its own rows of ahead 1 .. k

That is what the draft service does when it extends the trunk by true features, and grows a node, its child, and so on
along the text ("training-time test", EAGLE-3). What its tokens are along the way is taken from the text.

A decoder that is not fed with states has a row for every token itself: learnt row r says token r + 1, and nothing else
would come of looking further ahead.

Fewer rows may look further ahead than the first token: the first ones of each pack.

Legend of shapes: B packs, L places, R learnt rows, H hidden size, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.learning.batches import Batch
from services.draft.model.layers.attention import project
from services.draft.model.layers.config import Attention, Layer, ModelConfig
from services.draft.model.layers.decoder import layer_input, layer_output
from services.draft.model.layers.heads import Inputs, Params
from services.draft.model.matrices.mixed import Mixed, narrow_matmul
from services.draft.model.matrices.narrow import linear


class Kept(NamedTuple):
    """Keys and values of a layer: of the trunk [B, 2, G, L, D], and of each token ahead [B, 2, G, R, D]."""

    trunk: jax.Array
    ahead: tuple[jax.Array, ...] = ()

    def further(self, kv: jax.Array, count: int) -> Kept:
        """With one token more ahead, for the first rows alone."""
        return Kept(self.trunk, (*(past[:, :, :, :count] for past in self.ahead), kv))


class Ahead(NamedTuple):
    """One token ahead. state: [B, R, H], which logits come from; place: [B, R], whose distribution it foretells."""

    state: jax.Array
    place: jax.Array


def unroll(
    model: ModelConfig, params: Params, embed: jax.Array, feature: jax.Array | None, batch: Batch, counts: Sequence[int]
) -> Iterator[Ahead]:
    """The tokens ahead, one after the other. embed: [V, H]; feature: [B, L, H], what the target's states made;
    None if the model is not fed.

    counts: learnt rows of each pack that look so far ahead, in number the first ones; they do not rise
    """
    rows = batch.rows[:, : counts[0]]
    sees = _sees(batch, rows)
    handed, state, kept = _trunk(model, params, embed, feature, batch, rows, sees)
    yield Ahead(state, rows + model.head.fed)
    assert handed is not None or len(counts) == 1, "a fed head hands a state on"
    for ahead, count in enumerate(counts[1:], start=1):
        rows, sees, handed = rows[:, :count], sees[:, :count], handed[:, :count]
        place = rows + ahead
        token = jnp.take_along_axis(batch.inputs, place, axis=1)
        position = jnp.take_along_axis(batch.positions, rows, axis=1) + ahead
        x, beside = model.head.join(params, Inputs(embed[token].astype(handed.dtype), position, handed))
        for i, (layer, own) in enumerate(zip(model.layers, params["layers"], strict=True)):
            next_to = beside if layer.beside else None
            inner, residual = layer_input(layer, own, x, next_to)
            q, kv = _project(layer, own, inner, position)
            kept[i] = kept[i].further(kv, count)
            seen = linear(attend(q, kept[i], sees, isinstance(own["qkv"], Mixed)), own, "output")
            x = layer_output(layer, own, residual, seen)
        state, own_state = model.head.finish(params, x)
        handed = own_state
        yield Ahead(state, place + 1)


def _sees(batch: Batch, rows: jax.Array) -> jax.Array:
    """Which places of the trunk rows see: those of their record up to their own. rows: [B, R]. [B, R, L] bool."""
    places = jnp.arange(batch.segments.shape[1])
    segment = jnp.take_along_axis(batch.segments, rows, axis=1)
    same = segment[:, :, None] == batch.segments[:, None, :]
    return same & (places <= rows[:, :, None])


def _trunk(
    model: ModelConfig,
    params: Params,
    embed: jax.Array,
    feature: jax.Array | None,
    batch: Batch,
    rows: jax.Array,
    sees: jax.Array,
) -> tuple[jax.Array | None, jax.Array, list[Kept]]:
    """What learnt rows hand on, their states, and the trunk's keys and values.

    All layers but the last are computed at every place; of the last one only learnt rows are needed.
    """
    places = batch.segments.shape[1]
    embedding = embed[batch.inputs[:, :places]].astype(jnp.float32)
    x, beside = model.head.join(params, Inputs(embedding, batch.positions, feature))
    kept: list[Kept] = []
    everywhere = jnp.broadcast_to(jnp.arange(places), batch.segments.shape)
    for i, (layer, own) in enumerate(zip(model.layers, params["layers"], strict=True)):
        last = i == len(model.layers) - 1
        inner, residual = layer_input(layer, own, x, beside if layer.beside else None)
        q, kv = _project(layer, own, inner, batch.positions)
        kept.append(Kept(kv))
        if last:
            q, residual = jnp.take_along_axis(q, rows[:, None, None, :, None], axis=3), take(residual, rows)
        seen = attend(q, kept[-1], sees if last else _sees(batch, everywhere), isinstance(own["qkv"], Mixed))
        x = layer_output(layer, own, residual, linear(seen, own, "output"))
    state, handed = model.head.finish(params, x)
    return handed, state, kept


def take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of packs; behind the last one, that. x: [B, L, N]; rows: [B, R]. Returns [B, R, N]."""
    return jnp.take_along_axis(x, rows[:, :, None], axis=1, mode="clip")


def _project(
    layer: Layer, params: dict[str, Any], inner: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Queries [B, G, heads / G, N, D], and keys beside values [B, 2, G, N, D]."""
    a = layer.attention
    assert isinstance(a, Attention), "only grouped attention is trained"
    assert not a.gated
    assert (a.window, a.first, a.sinks, a.softcap) == (None, 0, False, None)
    q, kv, _ = project(params, a, inner, positions, layer.epsilon)
    q = q.reshape(*q.shape[:2], a.kv_heads, -1, a.head_dim).transpose(0, 2, 3, 1, 4)
    return q, kv.transpose(0, 2, 3, 1, 4)


def attend(q: jax.Array, kept: Kept, sees: jax.Array, narrow: bool) -> jax.Array:
    """What rows see of the trunk and of their own tokens ahead. q: [B, G, J, N, D]; sees: [B, N, L].

    narrow: multiply in bfloat16. Returns [B, N, G * J * D].
    """
    multiply = narrow_matmul if narrow else jnp.matmul
    packs, groups, shared, rows, dim = q.shape
    keys, values = kept.trunk[:, 0], kept.trunk[:, 1]  # [B, G, L, D]
    q = q / dim**0.5
    scores = multiply(q.reshape(packs, groups, shared * rows, dim), keys.swapaxes(2, 3))
    scores = jnp.where(sees[:, None, None], scores.reshape(packs, groups, shared, rows, -1), -1e30)
    own = [jnp.sum(q * kv[:, 0, :, None], axis=-1) for kv in kept.ahead]  # [B, G, J, N]
    best = scores.max(axis=-1)
    for score in own:
        best = jnp.maximum(best, score)
    best = jax.lax.stop_gradient(best)
    shares = jnp.exp(scores - best[..., None])  # [B, G, J, N, L]
    total = shares.sum(axis=-1)
    seen = multiply(shares.reshape(packs, groups, shared * rows, -1), values).reshape(q.shape)
    for score, kv in zip(own, kept.ahead, strict=True):
        share = jnp.exp(score - best)
        total = total + share
        seen = seen + share[..., None] * kv[:, 1, :, None]
    seen = seen / total[..., None]
    return seen.transpose(0, 3, 1, 2, 4).reshape(packs, rows, groups * shared * dim)
