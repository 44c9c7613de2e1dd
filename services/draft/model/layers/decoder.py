"""The decoder as pure functions: tokens in, states out, keys and values written into the pools.

Legend of shapes: S sessions, Q rows a session, H hidden size, V vocabulary, W width of a feature.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.kernels.base import Context, Paging
from services.draft.model.layers.attention import Step, attend
from services.draft.model.layers.config import Layer, ModelConfig
from services.draft.model.layers.feed_forward import feed_forward
from services.draft.model.layers.heads import Inputs, rms_norm
from services.draft.model.layers.kv_cache import Pools, keep_features
from services.draft.model.matrices.products import columns, lookup, product
from services.draft.model.matrices.sharded import ColumnSharded
from services.draft.model.params import Params


class Features(NamedTuple):
    """The features of a step's rows: from `rows` where `given`, else read from the pool.

    rows: [S, Q, W]; given: [S, Q] bool; sources: [S, Q] int32, slots of the parents' rows. For n stacked layers:
    sources [S, Q, n], slots of the target's features for each of them, read after the step's writes; layers [S, Q]
    int32, the layer that predicts from each row
    """

    rows: jax.Array
    given: jax.Array
    sources: jax.Array
    layers: jax.Array | None = None


class Rows(NamedTuple):
    """The rows of a step, [S, Q] int32 each. slots: where a row's keys and values are written; padding uses slot 0."""

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    features: Features | None = None


class Forward(NamedTuple):
    """A step of a decoder, whose layers are computed one after the other.

    moves: slots to copy first, [2, M] int32, sources and targets
    """

    params: Params
    config: ModelConfig
    pools: Pools
    rows: Rows
    context: Context
    moves: jax.Array
    paging: Paging

    def layer(self, index: int, x: jax.Array, beside: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """A layer's states behind x [S, Q, H], and its pool with the rows' keys and values."""
        description, params, pool = self.config.layers[index], self.params["layers"][index], self.pools.layers[index]
        step = Step(self.rows.positions, self.rows.slots, self.context, self.moves)
        beside = beside if description.beside else None
        states: tuple[jax.Array, jax.Array] = decoder_layer(description, self.paging, params, x, beside, pool, step)
        return states

    def keep_features(self, states: jax.Array) -> jax.Array | ColumnSharded:
        """The pool of features with the rows' states [S, Q, W]."""
        assert self.pools.features is not None, "a feature-based head has a pool of features"
        rows = states.reshape(-1, states.shape[-1])
        return keep_features(self.pools.features, self.moves, self.rows.slots.reshape(-1), rows, self.paging.backend)


def hidden_states(forward: Forward) -> tuple[jax.Array, Pools]:
    """The states that the rows' logits are computed from, [S, Q, H], and the updated pools.

    Features are read from their slots before the moves.
    """
    params, head = forward.params, forward.config.head
    x, beside = head.join(params, _inputs(embed(params, forward.rows.tokens), forward.rows, forward.pools))
    written: list[jax.Array] = []
    for index in range(len(forward.config.layers)):
        x, filled = forward.layer(index, x, beside)
        written.append(filled)
    state, handed = head.finish(params, x)
    kept = forward.pools.features
    if kept is not None:
        assert handed is not None, "a feature-based head passes a state on"
        kept = forward.keep_features(handed)
    return state, Pools(written, kept)


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Embeddings of tokens, [..., H]."""
    if "embed" in params:
        return lookup(params["embed"], tokens)
    return columns(params["head"], tokens, params["layers"][0]["mlp_norm"].dtype)


def _inputs(embedding: jax.Array, rows: Rows, pools: Pools) -> Inputs:
    if rows.features is None:
        return Inputs(embedding, rows.positions)
    assert pools.features is not None, "a feature-based head has a pool of features"
    own = lookup(pools.features, rows.features.sources)
    feature = jnp.where(rows.features.given[..., None], rows.features.rows.astype(own.dtype), own)
    return Inputs(embedding, rows.positions, feature)


@partial(jax.jit, static_argnums=(0, 1))
def decoder_layer(
    description: Layer,
    paging: Paging,
    layer: dict[str, jax.Array],
    x: jax.Array,
    beside: jax.Array | None,
    pool: jax.Array,
    step: Step,
) -> tuple[jax.Array, jax.Array]:
    """One layer on states x [S, Q, H]. Jitted by itself so that equal layers are traced once; XLA inlines it.

    A scan over stacked weights would compile faster, but XLA's CPU backend copies every layer's weights out of the
    stack first, which costs a third of a step with one row.
    """
    inner, residual = layer_input(description, layer, x, beside)
    seen, filled = attend(description.attention, paging, layer, inner, pool, step, description.epsilon)
    return layer_output(description, layer, residual, seen), filled


def layer_input(
    description: Layer, layer: dict[str, Any], x: jax.Array, beside: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The input of attention, and the residual that its output is added to. x, beside: [..., H]."""
    inner = rms_norm(x, layer["attention_norm"], description.epsilon) if description.input_norm else x
    residual = inner if description.residual_after_norm else x
    if beside is not None:
        inner = jnp.concatenate([rms_norm(beside, layer["beside_norm"], description.epsilon), inner], axis=-1)
    return inner, residual


def layer_output(description: Layer, layer: dict[str, Any], residual: jax.Array, seen: jax.Array) -> jax.Array:
    """The states behind a layer. seen: output of attention."""
    epsilon = description.epsilon
    if description.output_norms:
        seen = rms_norm(seen, layer["attention_output_norm"], epsilon)
    x = residual + seen
    output = feed_forward(description.mlp, layer, rms_norm(x, layer["mlp_norm"], epsilon))
    if description.output_norms:
        output = rms_norm(output, layer["mlp_output_norm"], epsilon)
    return x + output


def all_logits(params: Params, x: jax.Array, softcap: float | None = None, factor: float = 1.0) -> jax.Array:
    """As `head`, without the mask of padding."""
    logits = product(x, params["head"], jnp.float32)
    logits = logits if factor == 1 else factor * logits
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def head(
    params: Params, x: jax.Array, vocab_limit: int, softcap: float | None = None, factor: float = 1.0
) -> jax.Array:
    """Logits of states, [..., H] to [..., V] float32; ids from `vocab_limit` on are padding and masked.

    softcap, factor: as of ModelConfig
    """
    logits = all_logits(params, x, softcap, factor)
    ids = params.get("ids")
    if ids is None:
        if vocab_limit >= logits.shape[-1]:
            return logits
        ids = jnp.arange(logits.shape[-1])
    return jnp.where(ids < vocab_limit, logits, -1e30)
