"""Rounds of best-first growth in one program that ends them by itself: what a draft on the target's cores proposes.

    root     the last row of the input gives the root's K children
    round    the likeliest node that is not expanded, of all levels, gets K children

While such a draft computes, the target waits. So a round must gain more than its time is worth:

    gain of a round      probability of the likeliest node x probability that its best child is accepted
    value of its time    tokens that are expected so far / (the target's step + all levels so far)

Unlike `best_first.py`, the rounds are a loop, so that the program holds the model once however many there are.

Legend of shapes: S sessions, K children, R rounds at most, C = K (R + 1) nodes. Nodes of round r begin at K (r + 1).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from services.draft.model.layers.kv_cache import Pools
from services.draft.model.programs.best_first import GrownNodes
from services.draft.model.programs.whole_tree import Compute, Leaves, expansion_rows
from services.draft.sessions.batch import MASK_WORDS, Rounds, StepInputs, Stopping

# Probability that the best child of a node is accepted, for a drafter whose probabilities are right.
_BEST_CHILD = 0.75
_UNLIKELY = -1e30  # as in best_first.py


class _State(NamedTuple):
    """Between two rounds. done: rounds so far; expected: [S], draft tokens that are expected to be accepted.

    nodes: [S, C] each; scores: of their paths, calibrated, -inf for expanded and missing ones
    depths, rows: [S, C]; a node hangs below row 0, the root's, or e + 1, of the expansion in place e
    slots, bits: [S, R + 1] and [S, R + 1, words], of the rows
    """

    done: jax.Array
    expected: jax.Array
    nodes: GrownNodes
    scores: jax.Array
    depths: jax.Array
    rows: jax.Array
    slots: jax.Array
    bits: jax.Array
    pools: Pools


def grow_rounds(rounds: Rounds, compute: Compute, pools: Pools, inputs: StepInputs) -> tuple[GrownNodes, Pools]:
    """Run the input rows, and grow from the last of them. inputs: one head row a session, and an empty scratch.

    Returns all nodes, and the pools. Missing nodes have log-scores of -inf.
    """
    stopping = Stopping(*(inputs.stopping[:, i] for i in range(len(Stopping._fields))))
    (ids, edges), pools = compute(pools, inputs)
    state = _begin(rounds, inputs, stopping, ids[:, 0], edges[:, 0], pools)

    def goes_on(state: _State) -> jax.Array:
        best = jnp.exp(jnp.max(state.scores, axis=1) + stopping.quality)
        gain = jnp.where(state.done < stopping.limit, _BEST_CHILD * best, 0.0).sum()
        expected = jnp.where(stopping.limit >= 0, 1.0 + state.expected, 0.0).sum()
        return (state.done < rounds.most) & (gain * (jnp.max(stopping.pace) + state.done) > expected)

    state = lax.while_loop(goes_on, lambda state: _round(state, compute, inputs, stopping), state)
    return state.nodes, state.pools


def _begin(
    rounds: Rounds, inputs: StepInputs, stopping: Stopping, ids: jax.Array, edges: jax.Array, pools: Pools
) -> _State:
    """The state with the root's children. ids, edges: [S, K]."""
    count, k = ids.shape
    total = k * (rounds.most + 1)

    def room(filled: jax.Array, value: float) -> jax.Array:
        return jnp.full((count, total), value, filled.dtype).at[:, :k].set(filled)

    nodes = GrownNodes(
        room(ids, 0), jnp.full((count, total), -1, jnp.int32), jnp.full((count, total), -1, jnp.int32),
        room(edges, -jnp.inf),
    )  # fmt: skip
    scores = edges + stopping.quality[:, None]
    root = jnp.take_along_axis(inputs.slots, inputs.head_rows, axis=1)
    return _State(
        done=jnp.int32(0),
        expected=jnp.exp(scores[:, 0]),
        nodes=nodes,
        scores=room(jnp.maximum(scores, _UNLIKELY), -jnp.inf),
        depths=jnp.ones((count, total), jnp.int32),
        rows=jnp.zeros((count, total), jnp.int32),
        slots=jnp.zeros((count, rounds.most + 1), root.dtype).at[:, :1].set(root),
        bits=jnp.zeros((count, rounds.most + 1, MASK_WORDS), jnp.uint32),
        pools=pools,
    )


def _round(state: _State, compute: Compute, inputs: StepInputs, stopping: Stopping) -> _State:
    done, nodes = state.done, state.nodes
    scores, flat = lax.top_k(state.scores, 1)  # [S, 1]
    depths, above = (jnp.take_along_axis(part, flat, axis=1) for part in (state.depths, state.rows))
    leaves = Leaves(
        jnp.take_along_axis(nodes.tokens, flat, axis=1),
        jnp.take_along_axis(state.slots, above, axis=1),
        jnp.take_along_axis(state.bits, above[..., None], axis=1),
    )
    keys = jnp.take_along_axis(inputs.level_keys, (depths - 1)[..., None], axis=1)
    rows = expansion_rows(inputs, leaves, done, depths, keys)
    (ids, edges), pools = compute(state.pools, rows)
    ids, edges = ids[:, 0], edges[:, 0]
    sessions = jnp.arange(len(ids))[:, None]
    first = ids.shape[1] * (done + 1)

    def put(part: jax.Array, new: jax.Array) -> jax.Array:
        filled: jax.Array = lax.dynamic_update_slice(
            part, jnp.broadcast_to(new, ids.shape).astype(part.dtype), (0, first)
        )
        return filled

    below = jnp.maximum(scores + edges + stopping.quality[:, None], _UNLIKELY)
    return _State(
        done=done + 1,
        expected=state.expected + jnp.exp(below[:, 0]),
        nodes=GrownNodes(
            put(nodes.tokens, ids),
            put(nodes.parents, flat),
            nodes.places.at[sessions, flat].set(done),
            put(nodes.edges, edges),
        ),
        scores=put(state.scores.at[sessions, flat].set(-jnp.inf), below),
        depths=put(state.depths, depths + 1),
        rows=put(state.rows, jnp.broadcast_to(done + 1, flat.shape)),
        slots=lax.dynamic_update_slice(state.slots, rows.slots.astype(state.slots.dtype), (0, done + 1)),
        bits=lax.dynamic_update_slice(state.bits, rows.scratch_bits, (0, done + 1, 0)),
        pools=pools,
    )
