"""A pass of a block drafter as a program: context rows of a commit, and the block behind them.

The inputs are those of a commit's rows. The block follows from them: its root is the token of the last row, one
position further, and its rows take the first slots of the scratch.

A selector (DFlash 2) corrects the score of a candidate by the token before it, with an embedding of each:

    score(token | before) + sum(previous[before] * project(state) * next[token])

Legend of shapes: S sessions, P predicted positions, N candidates of a position, K children of a node, r rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from outrider.speculation.sampling import GREEDY_BELOW
from services.draft.kernels.base import Context
from services.draft.model.layers.block import BlockRows
from services.draft.model.layers.heads import BlockHead
from services.draft.model.matrices.products import lookup, product
from services.draft.model.params import Params
from services.draft.model.programs.sampling import Sampling
from services.draft.sessions.batch import Block, StepInputs

_LEAST = 1e-9  # probability of all tokens but the candidates


def block_rows(block: Block, head: BlockHead, inputs: StepInputs) -> BlockRows:
    """The blocks behind the last rows of a step's sessions."""
    size, sessions = block.size, inputs.tokens.shape[0]
    root = jnp.take_along_axis(inputs.tokens, inputs.head_rows, axis=1)  # [S, 1]
    first = jnp.take_along_axis(inputs.positions, inputs.head_rows, axis=1) + 1
    masks = jnp.full((sessions, size - 1), head.mask_token, jnp.int32)
    whole = jnp.arange(inputs.scratch_slots.shape[1]) < size
    context = Context(
        inputs.pages,
        jnp.broadcast_to(first, (sessions, size)),
        inputs.scratch_slots,
        jnp.broadcast_to(whole, (sessions, size, len(whole))),
    )
    positions = first + jnp.arange(size, dtype=jnp.int32)
    return BlockRows(jnp.concatenate([root, masks], axis=1), positions, inputs.scratch_slots[:, :size], context)


def block_keys(inputs: StepInputs) -> jax.Array:
    """Noise keys of the predicted positions, [S, B - 1, 2]."""
    return jnp.concatenate([inputs.keys[:, :1], inputs.level_keys], axis=1)


def selected(
    params: Params, states: jax.Array, root: jax.Array, ids: jax.Array, log_scores: jax.Array, sampling: Sampling,
    children: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The best children of every candidate, by a selector. states: [S, P, H]; root: [S]; ids, log_scores: [S, P, N].

    Returns two arrays [S, P, N + N * K]: the ids, and for each candidate of the position before the places of its
    children among them, best first; zeros, and their log-scores. The first position has the root before it, alone.
    """
    before = jnp.concatenate([jnp.broadcast_to(root[:, None, None], ids[:, :1].shape), ids[:, :-1]], axis=1)
    hidden = product(states, params["selector"]).astype(jnp.float32)
    previous = lookup(params["selector_previous"], before).astype(jnp.float32) * hidden[:, :, None]
    correction = jnp.einsum("spar,spnr->span", previous, lookup(params["selector_next"], ids).astype(jnp.float32))
    divisor = jnp.where(sampling.temperature >= GREEDY_BELOW, sampling.temperature, 1.0)
    scores = log_scores[:, :, None] + correction / divisor[:, None, None, None]
    others = jnp.log(jnp.maximum(1.0 - jnp.exp(log_scores).sum(axis=-1), _LEAST))[:, :, None, None]
    total = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1, keepdims=True), others)  # other tokens are not corrected
    best, places = lax.top_k(scores - total, children)
    flat = (*ids.shape[:2], -1)
    return (
        jnp.concatenate([ids, places.reshape(flat)], axis=-1),
        jnp.concatenate([jnp.zeros_like(log_scores), best.reshape(flat)], axis=-1),
    )
