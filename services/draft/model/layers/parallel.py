"""Parallel heads (P-EAGLE): one pass of an EAGLE-3 head predicts the tokens of several positions.

    prefix   row j: token j + 1 and the target's feature j, at position j; the last one is the root's, and predicts its
             child
    masks    behind the root's row, one position further each: the mask token's embedding and a learnt feature. They see
             the prefix and the masks before them, and predict the tokens behind the child

The rows of masks stay in the scratch until the next pass.

Legend of shapes: S sessions, F rows of the prefix, M masks, H hidden size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.draft.kernels.base import Context
from services.draft.model.layers.decoder import Features, Forward, Rows, hidden_states
from services.draft.model.layers.heads import ParallelHead
from services.draft.model.layers.kv_cache import Pools


def parallel_states(forward: Forward, head_rows: jax.Array, count: int) -> tuple[jax.Array, Pools]:
    """The states that the logits of a pass are computed from, [S, 1 + M, H], and the pools.

    forward: with the rows of the prefix; head_rows: [S, 1], the root's; count: M
    """
    rows = forward.rows.tokens.shape[1]
    x, pools = hidden_states(_with_masks(forward, head_rows, count))
    root = jnp.take_along_axis(x[:, :rows], head_rows[..., None], axis=1)
    return jnp.concatenate([root, x[:, rows:]], axis=1), pools


def _with_masks(forward: Forward, head_rows: jax.Array, count: int) -> Forward:
    """The step with rows of masks behind those of the prefix."""
    head, rows, context = forward.config.head, forward.rows, forward.context
    assert isinstance(head, ParallelHead)
    assert rows.features is not None, "a feature-based head reads features"
    sessions, scratch = context.scratch_slots.shape
    first = jnp.take_along_axis(rows.positions, head_rows, axis=1) + 1  # [S, 1], rows of the prefix

    def each(number: int | bool) -> jax.Array:
        return jnp.full((sessions, count), number, type(number))

    feature = jnp.broadcast_to(forward.params["mask"], (sessions, count, rows.features.rows.shape[-1]))
    features = Features(
        jnp.concatenate([rows.features.rows, feature.astype(rows.features.rows.dtype)], axis=1),
        jnp.concatenate([rows.features.given, each(True)], axis=1),
        jnp.concatenate([rows.features.sources, each(0)], axis=1),
    )
    masks = Rows(
        jnp.concatenate([rows.tokens, each(head.mask_token)], axis=1),
        jnp.concatenate([rows.positions, first + jnp.arange(count)], axis=1),
        jnp.concatenate([rows.slots, context.scratch_slots[:, :count]], axis=1),
        features,
    )
    before = jnp.arange(scratch) <= jnp.arange(count)[:, None]
    seen = Context(
        context.pages,
        jnp.concatenate([context.visible, jnp.broadcast_to(first, (sessions, count))], axis=1),
        context.scratch_slots,
        jnp.concatenate([context.scratch_mask, jnp.broadcast_to(before, (sessions, count, scratch))], axis=1),
    )
    return forward._replace(rows=masks, context=seen)
