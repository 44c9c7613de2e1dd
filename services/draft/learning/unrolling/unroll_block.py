"""The blocks of a block drafter in training, computed as the draft service computes them (model/layers/block.py).

    context   every place of a pack: the target's feature; keys and values for all blocks of its record
    block     trained row r: the root is token r + 1, at position r + 1; the mask k positions further predicts token
              r + 1 + k. It attends to the context up to r, and to its own block

Position k is handed on as an unroll step, so that loss and evaluation are those of the other heads.

Legend of shapes: B packs, L places, R trained rows, S positions of a block, H hidden size, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from services.draft.learning.records.batches import Batch
from services.draft.learning.unrolling.unroll import UnrollStep, project_heads, visible_places
from services.draft.model.layers.config import ModelConfig
from services.draft.model.layers.decoder import layer_input, layer_output
from services.draft.model.layers.heads import BlockHead, Inputs
from services.draft.model.matrices.mixed_precision import MixedPrecisionWeight, bf16_matmul
from services.draft.model.matrices.products import linear
from services.draft.model.params import Params


def unroll_block(
    model: ModelConfig, params: Params, embed: jax.Array, feature: jax.Array | None, batch: Batch, counts: Sequence[int]
) -> Iterator[UnrollStep]:
    """The predicted positions of the rows' blocks, one after the other. Arguments as of `unroll`; a block has a
    position more than there are counts.
    """
    head = model.head
    assert isinstance(head, BlockHead)
    assert feature is not None, "a block drafter reads features"
    rows, size = batch.rows[:, : counts[0]], len(counts) + 1
    sees, known = visible_places(batch, rows), head.context(params, feature)
    x, positions = _inputs(head, params, embed, batch, rows, size)
    for layer, own, causal in zip(model.layers, params["layers"], head.causal, strict=True):
        inner, residual = layer_input(layer, own, x, None)
        context = project_heads(layer, own, known, batch.positions)[1]
        q, kv = project_heads(layer, own, inner, positions)
        seen = _attend(
            q, context, kv, sees, causal=causal, mixed_precision=isinstance(own["qkv"], MixedPrecisionWeight)
        )
        x = layer_output(layer, own, residual, linear(seen, own, "output"))
    state = head.finish(params, x)[0].reshape(*rows.shape, size, -1)
    for k, count in enumerate(counts, start=1):
        yield UnrollStep(state[:, :count, k], rows[:, :count] + k)


def _inputs(
    head: BlockHead, params: Params, embed: jax.Array, batch: Batch, rows: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Embeddings and positions of the blocks, [B, R * S, H] and [B, R * S]."""
    root = jnp.take_along_axis(batch.inputs, rows, axis=1)[..., None]
    masks = jnp.full((*rows.shape, size - 1), head.mask_token, root.dtype)
    tokens = jnp.concatenate([root, masks], axis=-1).reshape(len(rows), -1)
    first = jnp.take_along_axis(batch.positions, rows, axis=1)[..., None] + 1
    positions = (first + jnp.arange(size)).reshape(tokens.shape)
    x, _ = head.join(params, Inputs(embed[tokens].astype(jnp.float32), positions))
    return x, positions


def _attend(
    q: jax.Array, context: jax.Array, kv: jax.Array, sees: jax.Array, *, causal: bool, mixed_precision: bool
) -> jax.Array:
    """Attention over the context and the row's own block. q: [B, G, J, R * S, D]; context: [B, 2, G, L, D]; kv:
    [B, 2, G, R * S, D]; sees: [B, R, L]. Returns [B, R * S, G * J * D].
    """
    multiply = bf16_matmul if mixed_precision else jnp.matmul
    packs, groups, shared, _, dim = q.shape
    rows, places = sees.shape[1:]
    q = q / dim**0.5
    flat = q.reshape(packs, groups, -1, dim)
    far = multiply(flat, context[:, 0].swapaxes(2, 3)).reshape(packs, groups, shared, rows, -1, places)
    far = jnp.where(sees[:, None, None, :, None], far, -1e30)
    blocks = kv.reshape(packs, 2, groups, rows, -1, dim)
    near = jnp.einsum("bgjrsd,bgrtd->bgjrst", q.reshape(packs, groups, shared, rows, -1, dim), blocks[:, 0])
    size = near.shape[-1]
    if causal:
        near = jnp.where(jnp.tril(jnp.ones((size, size), bool)), near, -1e30)
    shares = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
    far, near = shares[..., :places], shares[..., places:]
    seen = multiply(far.reshape(packs, groups, -1, places), context[:, 1]).reshape(q.shape)
    seen = seen + jnp.einsum("bgjrst,bgrtd->bgjrsd", near, blocks[:, 1]).reshape(q.shape)
    return seen.transpose(0, 3, 1, 2, 4).reshape(packs, rows * size, groups * shared * dim)
