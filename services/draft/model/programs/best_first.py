"""Several rounds of best-first growth in one program, for adaptive trees.

    root     the last row of the input gives the root's K children
    round    the W likeliest nodes that are not expanded, of all levels, each get K children

The host grows trees in the same way, a round at a time (engine/expansion.py); it goes on from what such a program has
grown. Between rounds the device neither waits for the host nor sends anything.

Flat numbers count nodes in the order in which they are found, so that parents stand before their children.

Legend of shapes: S sessions, K children, W expanded nodes a round, C nodes so far.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from services.draft.model.layers.kv_cache import Pools
from services.draft.model.programs.whole_tree import Compute, Leaves, expansion_rows
from services.draft.sessions.batch import MASK_WORDS, Growth, StepInputs

# Least score of a path: impossible tokens stay likelier than nodes that are expanded already.
_UNLIKELY = -1e30


class GrownNodes(NamedTuple):
    """All nodes of trees by flat number, [S, C] each. parents: flat number, or -1. edges: log-scores.

    places: of their rows in the scratch; -1 for nodes that are not expanded
    """

    tokens: jax.Array
    parents: jax.Array
    places: jax.Array
    edges: jax.Array


class _Candidates(NamedTuple):
    """All nodes so far by flat number, [S, C] each. scores: of their paths, -inf for expanded ones.

    rows: index of the row that they hang below: 0 is the root's, e + 1 that of the expansion in place e
    """

    nodes: GrownNodes
    depths: jax.Array
    scores: jax.Array
    rows: jax.Array


def grow_best_first(growth: Growth, compute: Compute, pools: Pools, inputs: StepInputs) -> tuple[GrownNodes, Pools]:
    """Run the input rows, and grow from the last of them. inputs: one head row a session, and an empty scratch.

    Returns all nodes, and the pools.
    """
    (ids, edges), pools = compute(pools, inputs)
    count, width = ids.shape[0], growth.width
    assert width <= ids.shape[2], "the first round has as many leaves as the root has children"
    none = jnp.zeros_like(ids[:, 0])
    found = _new(ids[:, 0], edges[:, 0], parents=none - 1, depths=none + 1, scores=edges[:, 0], rows=none)
    slots = jnp.take_along_axis(inputs.slots, inputs.head_rows, axis=1)  # of the rows, the root's first
    bits = jnp.zeros((count, 1, MASK_WORDS), jnp.uint32)
    sessions = jnp.arange(count)[:, None]
    for first in range(0, growth.expansions, width):
        scores, flat = lax.top_k(found.scores, width)
        depths, above = (jnp.take_along_axis(part, flat, axis=1) for part in (found.depths, found.rows))
        leaves = Leaves(
            jnp.take_along_axis(found.nodes.tokens, flat, axis=1),
            jnp.take_along_axis(slots, above, axis=1),
            jnp.take_along_axis(bits, above[..., None], axis=1),
        )
        keys = jnp.take_along_axis(inputs.level_keys, (depths - 1)[..., None], axis=1)
        rows = expansion_rows(inputs, leaves, first, depths, keys)
        (ids, edges), pools = compute(pools, rows)
        slots, bits = jnp.concatenate([slots, rows.slots], axis=1), jnp.concatenate([bits, rows.scratch_bits], axis=1)
        places = jnp.broadcast_to(first + jnp.arange(width, dtype=jnp.int32), (count, width))
        found = found._replace(
            nodes=found.nodes._replace(places=found.nodes.places.at[sessions, flat].set(places)),
            scores=found.scores.at[sessions, flat].set(-jnp.inf),
        )
        more = _new(
            ids.reshape(count, -1),
            edges.reshape(count, -1),
            parents=jnp.repeat(flat, ids.shape[2], axis=1),
            depths=jnp.repeat(depths + 1, ids.shape[2], axis=1),
            scores=(scores[..., None] + edges).reshape(count, -1),
            rows=jnp.repeat(places + 1, ids.shape[2], axis=1),
        )
        found = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), found, more)
    return found.nodes, pools


def _new(
    tokens: jax.Array, edges: jax.Array, *, parents: jax.Array, depths: jax.Array, scores: jax.Array, rows: jax.Array
) -> _Candidates:
    nodes = GrownNodes(tokens, parents, jnp.full_like(parents, -1), edges)
    return _Candidates(nodes, depths, jnp.maximum(scores, _UNLIKELY), rows)
