"""Block drafters (DFlash): one pass of the layers predicts the tokens of a whole block of positions.

    context   row j: the target's feature j, fused and normed, at position j. It passes through no layer: every layer
              makes its keys and values of row j from the same context, so that all rows are independent of one another
    block     row 0: the root, at position length - 1; behind it masks, which predict the tokens at their own positions.
              Each attends to the whole context, and to the whole block; in causal layers to the block up to itself

Context rows stay in the prefix KV, those of the block in the scratch until the next pass.

In DFlash 2 a short convolution along the block stands before and behind attention and the feed-forward part. Its kernel
is learnt by channel, plus a part that the position itself projects for each group of channels.

Legend of shapes: S sessions, F context rows, B positions of a block, H hidden size, T taps and G groups of a kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.kernels.base import Context, Paging
from services.draft.model.layers.attention import first_seen, project
from services.draft.model.layers.backend import attention
from services.draft.model.layers.config import Attention, Layer
from services.draft.model.layers.decoder import Forward, embed, layer_input, layer_output
from services.draft.model.layers.feed_forward import feed_forward
from services.draft.model.layers.heads import BlockHead, Inputs, rms_norm
from services.draft.model.layers.kv_cache import Pools, move_and_write
from services.draft.model.matrices.products import linear, product


class BlockRows(NamedTuple):
    """The blocks of a step. tokens, positions, slots: [S, B] int32; context: of rows that attend to the whole block."""

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    context: Context


class _Places(NamedTuple):
    """Where a layer's rows are, context before block. positions, slots: [S, F + B]; moves: slots to copy first."""

    positions: jax.Array
    slots: jax.Array
    moves: jax.Array


def context_pools(forward: Forward) -> Pools:
    """The pools with the context rows of a step."""
    known, rows = _context(forward), forward.rows
    places = _Places(rows.positions, rows.slots, forward.moves)
    written: list[jax.Array] = []
    for index, layer in enumerate(forward.config.layers):
        own, pool = forward.params["layers"][index], forward.pools.layers[index]
        written.append(_fill(layer, forward.paging, own, known, pool, places)[1])
    return Pools(written)


def block_states(forward: Forward, block: BlockRows) -> tuple[jax.Array, Pools]:
    """The states that the logits of a block are computed from, [S, B, H], and the pools. Forward's rows: context."""
    head, rows = forward.config.head, forward.rows
    assert isinstance(head, BlockHead)
    known = _context(forward)
    x, _ = head.join(forward.params, Inputs(embed(forward.params, block.tokens), block.positions))
    places = _Places(
        jnp.concatenate([rows.positions, block.positions], axis=1),
        jnp.concatenate([rows.slots, block.slots], axis=1),
        forward.moves,
    )
    written: list[jax.Array] = []
    for index, (layer, causal) in enumerate(zip(forward.config.layers, head.causal, strict=True)):
        own, pool = forward.params["layers"][index], forward.pools.layers[index]
        context = _up_to_itself(block.context) if causal else block.context
        x, filled = _block_layer(layer, forward.paging, head.group, own, known, x, pool, places, context)
        written.append(filled)
    return head.finish(forward.params, x)[0], Pools(written)


def _context(forward: Forward) -> jax.Array:
    """The context of a step's rows, [S, F, H]."""
    head, features = forward.config.head, forward.rows.features
    assert isinstance(head, BlockHead)
    assert features is not None, "a block drafter reads features"
    return head.context(forward.params, features.rows.astype(forward.params["norm"].dtype))


def _up_to_itself(context: Context) -> Context:
    """The context of causal layers: the block's row i has slot i of the scratch."""
    rows, slots = context.scratch_mask.shape[1:]
    before = jnp.arange(slots) <= jnp.arange(rows)[:, None]
    return context._replace(scratch_mask=context.scratch_mask & before)


def _fill(
    layer: Layer, paging: Paging, own: dict[str, Any], states: jax.Array, pool: jax.Array, places: _Places
) -> tuple[jax.Array, jax.Array]:
    """Queries of rows [S, N, heads, D], and the pool with their keys and values. states: [S, N, H]."""
    assert isinstance(layer.attention, Attention)
    q, kv, _ = project(own, layer.attention, states, places.positions, layer.epsilon)
    rows = kv.reshape(-1, *kv.shape[2:])
    return q, move_and_write(pool, places.moves, places.slots.reshape(-1), rows, paging.backend)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _block_layer(
    layer: Layer,
    paging: Paging,
    group: int,
    own: dict[str, jax.Array],
    known: jax.Array,
    x: jax.Array,
    pool: jax.Array,
    places: _Places,
    context: Context,
) -> tuple[jax.Array, jax.Array]:
    """The block's states behind a layer, and its pool. known: the context. Jitted by itself as `decoder_layer`.

    Context and block are multiplied together: on CPUs reading the matrix takes longer than a few more rows, and the
    queries of context rows are not used.
    """
    assert isinstance(layer.attention, Attention)
    inner, residual = layer_input(layer, own, x, None)
    kernel = None
    if group:
        inner, kernel = _convolved(own, "attention_conv", inner, group)
    q, filled = _fill(layer, paging, own, jnp.concatenate([known, inner], axis=1), pool, places)
    count = x.shape[1]
    since = first_seen(layer.attention, places.positions[:, -count:])
    seen = attention(q[:, -count:], filled, context, paging, since=since)
    output = linear(seen.reshape(*x.shape[:2], -1), own, "output")
    if kernel is None:
        return layer_output(layer, own, residual, output), filled
    x = residual + _convolve(output, *kernel)
    inner, kernel = _convolved(own, "mlp_conv", rms_norm(x, own["mlp_norm"], layer.epsilon), group)
    return x + _convolve(feed_forward(layer.mlp, own, inner), *kernel), filled


class _Kernel(NamedTuple):
    """A convolution along a block. base: [T, H]; changing: [S, B, T, H], added to it by position."""

    base: jax.Array
    changing: jax.Array


def _convolved(own: dict[str, jax.Array], name: str, x: jax.Array, group: int) -> tuple[jax.Array, _Kernel]:
    """Rows behind the first convolution of a part of the layer, and the kernel of the second one. x: [S, B, H].

    own: `name` [H, 2 * T * G] and `name`_base [2, T, H]
    """
    base = own[f"{name}_base"]
    changing = product(x, own[name]).reshape(*x.shape[:2], 2, base.shape[1], -1)
    changing = jnp.repeat(changing, group, axis=-1)
    return _convolve(x, base[0], changing[:, :, 0]), _Kernel(base[1], changing[:, :, 1])


def _convolve(x: jax.Array, base: jax.Array, changing: jax.Array) -> jax.Array:
    """The sum over taps of the row that many positions before, times the kernel. x: [S, B, H]."""
    taps = range(len(base))
    before = [jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]] for tap in taps]
    return sum(((base[tap] + changing[:, :, tap]) * before[tap] for tap in taps), jnp.zeros_like(x))
