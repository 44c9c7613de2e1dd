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

from services.draft.kernels.base import Context, Paging
from services.draft.model.layers.attention import Step
from services.draft.model.layers.config import ModelConfig
from services.draft.model.layers.decoder import Rows, decoder_layer, embed
from services.draft.model.layers.heads import Inputs
from services.draft.model.layers.kv_cache import Pools, keep_features, move_and_write
from services.draft.model.matrices.products import lookup
from services.draft.model.params import Params


def stacked_states(
    params: Params,
    config: ModelConfig,
    pools: Pools,
    rows: Rows,
    context: Context,
    moves: jax.Array,
    paging: Paging,
) -> tuple[jax.Array, Pools]:
    """As decoder.hidden_states. params["joins"]: each layer's head. The pool of features holds the target's alone."""
    features = rows.features
    assert features is not None, "stacked layers read features"
    assert features.layers is not None, "stacked rows name the layer that predicts"
    assert pools.features is not None, "a feature-based head has a pool of features"
    embedding = embed(params, rows.tokens)
    given = features.rows.astype(embedding.dtype).reshape(-1, features.rows.shape[-1])
    kept = keep_features(pools.features, moves, rows.slots.reshape(-1), given, paging.backend)
    step = Step(rows.positions, rows.slots, context, moves)
    states: list[jax.Array] = []
    written: list[jax.Array] = []
    source, links = kept, list[jax.Array]()
    caches, chain = pools.layers[: len(config.layers)], pools.layers[len(config.layers) :]
    for i, (description, layer, pool) in enumerate(zip(config.layers, params["layers"], caches, strict=True)):
        inputs = Inputs(embedding, rows.positions, lookup(source, features.sources[..., i]))
        x, _ = config.head.join(params["joins"][i], inputs)
        x, filled = decoder_layer(description, paging, layer, x, None, pool, step)
        state, handed = config.head.finish(params["joins"][i], x)
        states.append(state)
        written.append(filled)
        if i < len(chain):
            assert handed is not None, "an MTP layer passes a state on"
            given = handed.reshape(-1, handed.shape[-1])
            source = move_and_write(chain[i], moves, rows.slots.reshape(-1), given, paging.backend)
            links.append(source)
    chosen = jnp.take_along_axis(jnp.stack(states), features.layers[None, ..., None], axis=0)[0]
    if config.own_heads:
        chosen = _at_own_head(chosen, features.layers, len(config.layers))
    return chosen, Pools([*written, *links], kept)


def _at_own_head(states: jax.Array, layers: jax.Array, count: int) -> jax.Array:
    """States [S, Q, H] as [S, Q, count * H]: zeros but for the part that the layer's own output layer multiplies."""
    own = jax.nn.one_hot(layers, count, dtype=states.dtype)
    return (own[..., None] * states[..., None, :]).reshape(*states.shape[:-1], -1)
