"""Stacked MTP layers (MiMo-V2, Step-3.5): layer i predicts i tokens further, each from the target's features.

    row          j - 1    j      j + 1           of the prefix KV; row j has token j + 1 in every layer
    layer 0      f j-1    f j    f j+1           the feature that it is fused with
    layer 1      f j-2    f j-1  f j

With the features of rows up to j known, layer 0 predicts the token behind row j, layer 1 the token behind its child,
and so on: a tree is as deep as there are layers, and all of it is computed from the target's own features. A row passes
through all layers at once; the output of a layer without a feature is never used, nor visible to a row that is used.

Chained layers (Step-3.5) but the first are fused with the state of the layer before instead, of the row before: layer i
of row j reads layer i - 1 of row j - 1, so that it depends on the same features. These states are kept in pools, too.

Published, layer i's row j has token j + 1 + i and position j; here it lies i rows further on, at slot and position
j + i, which is the same to rotary embeddings, and the first i rows of a layer are never visible.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.draft.model.layers.decoder import Forward, embed
from services.draft.model.layers.heads import Inputs
from services.draft.model.layers.kv_cache import Pools, move_and_write
from services.draft.model.matrices.products import lookup


def stacked_states(forward: Forward) -> tuple[jax.Array, Pools]:
    """As decoder.hidden_states. params["joins"]: each layer's head. The pool of features holds the target's alone."""
    rows, head, joins = forward.rows, forward.config.head, forward.params["joins"]
    features = rows.features
    assert features is not None, "stacked layers read features"
    assert features.layers is not None, "stacked rows name the layer that predicts"
    embedding = embed(forward.params, rows.tokens)
    kept = forward.keep_features(features.rows.astype(embedding.dtype))
    states: list[jax.Array] = []
    written: list[jax.Array] = []
    source, links = kept, list[jax.Array]()
    chain = forward.pools.layers[len(joins) :]
    for index, join in enumerate(joins):
        inputs = Inputs(embedding, rows.positions, lookup(source, features.sources[..., index]))
        x, filled = forward.layer(index, head.join(join, inputs)[0])
        state, passed = head.finish(join, x)
        states.append(state)
        written.append(filled)
        if index < len(chain):
            assert passed is not None, "an MTP layer passes a state on"
            given, slots = passed.reshape(-1, passed.shape[-1]), rows.slots.reshape(-1)
            source = move_and_write(chain[index], forward.moves, slots, given, forward.paging.backend)
            links.append(source)
    chosen = jnp.take_along_axis(jnp.stack(states), features.layers[None, ..., None], axis=0)[0]
    if forward.config.own_heads:
        chosen = _at_own_head(chosen, features.layers, len(joins))
    return chosen, Pools([*written, *links], kept)


def _at_own_head(states: jax.Array, layers: jax.Array, count: int) -> jax.Array:
    """States [S, Q, H] as [S, Q, count * H]: zeros but for the part that the layer's own output layer multiplies."""
    own = jax.nn.one_hot(layers, count, dtype=states.dtype)
    return (own[..., None] * states[..., None, :]).reshape(*states.shape[:-1], -1)
