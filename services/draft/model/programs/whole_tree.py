"""A whole draft tree of explicit shape in one program, level by level with a beam, as engine/beam.py grows it.

    level 0    the last row of the input gives the root's K children; all of them are the beam
    level i    K rows, one a node of the beam, in the scratch; the best K of their K * K candidates are the next beam
    choice     the N - 1 best candidates of all levels

Flat numbers count candidates level by level, in the order of the beam and of each node's children. Ties go to the lower
number, as in `lax.top_k`, so that parents stand before their children.

Legend of shapes: S sessions, K children, C candidates of all levels, N tokens of the tree with the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from outrider.speculation.shape import TreeShape
from services.draft.model.layers.kv_cache import Pools
from services.draft.sessions.batch import MASK_WORDS, StepInputs

# One step: returns candidates [S, R, K] and their log-scores, and the pools.
Compute = Callable[[Pools, StepInputs], tuple[tuple[jax.Array, jax.Array], Pools]]


class Nodes(NamedTuple):
    """Nodes of trees, [S, n] each. parents: index among them, or flat number; -1 is the root. edges: log-scores."""

    tokens: jax.Array
    parents: jax.Array
    edges: jax.Array


class Leaves(NamedTuple):
    """The nodes to expand next, best first, [S, k] each, except bits [S, k, words].

    above: slots of their parents' rows; bits: their ancestors in the scratch
    """

    tokens: jax.Array
    above: jax.Array
    bits: jax.Array


class _Beam(NamedTuple):
    """The nodes to expand next, with their flat numbers and path scores, [S, K] each."""

    leaves: Leaves
    flat: jax.Array
    scores: jax.Array


def grow_tree(tree: TreeShape, compute: Compute, pools: Pools, inputs: StepInputs) -> tuple[Nodes, Pools]:
    """Run the input rows, and grow a tree from the last of them. inputs: one head row a session, and an empty scratch.

    Returns the N - 1 chosen nodes by flat number, and the pools.
    """
    (ids, edges), pools = compute(pools, inputs)
    count, k = ids.shape[0], tree.topk
    levels = [Nodes(ids[:, 0], jnp.full((count, k), -1, jnp.int32), edges[:, 0])]
    scores = [edges[:, 0]]
    root = jnp.take_along_axis(inputs.slots, inputs.head_rows, axis=1)
    leaves = Leaves(ids[:, 0], jnp.broadcast_to(root, (count, k)), jnp.zeros((count, k, MASK_WORDS), jnp.uint32))
    beam = _Beam(leaves, jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (count, k)), edges[:, 0])
    for level in range(1, tree.steps):
        keys = jnp.broadcast_to(inputs.level_keys[:, level - 1 : level], (count, k, 2))
        rows = expansion_rows(inputs, beam.leaves, (level - 1) * k, level, keys)
        (ids, edges), pools = compute(pools, rows)
        nodes = Nodes(ids.reshape(count, -1), jnp.repeat(beam.flat, k, axis=1), edges.reshape(count, -1))
        levels.append(nodes)
        scores.append((beam.scores[..., None] + edges).reshape(count, -1))
        beam = _next(rows, nodes.tokens, scores[-1], first=k + (level - 1) * k * k)
    everything = Nodes(*(jnp.concatenate(parts, axis=1) for parts in zip(*levels, strict=True)))
    return _chosen(everything, jnp.concatenate(scores, axis=1), tree.rows - 1), pools


def expansion_rows(
    inputs: StepInputs, leaves: Leaves, first: jax.Array | int, depths: jax.Array | int, keys: jax.Array
) -> StepInputs:
    """Inputs of the step that expands leaves. first: their first place in the scratch.

    depths: of the leaves, from 1, [S, k] or the same for all. keys: [S, k, 2], noise keys of their children
    """
    count, k = leaves.tokens.shape
    last = jnp.take_along_axis(inputs.positions, inputs.head_rows, axis=1)  # of the prefix KV, [S, 1]
    places = first + jnp.arange(k)
    bit = jnp.uint32(1) << (places % 32).astype(jnp.uint32)
    own = jnp.where(places[:, None] // 32 == jnp.arange(MASK_WORDS), bit[:, None], jnp.uint32(0))
    features = inputs.features
    if features is not None:
        none = jnp.zeros((count, k), jnp.int32)
        features = features._replace(
            rows=jnp.zeros((count, k, features.rows.shape[-1]), features.rows.dtype), given=none, sources=leaves.above
        )
    return inputs._replace(
        tokens=leaves.tokens,
        positions=jnp.broadcast_to(last + depths, (count, k)),
        slots=inputs.scratch_slots[:, places],
        visible=jnp.broadcast_to(last + 1, (count, k)),
        head_rows=jnp.broadcast_to(jnp.arange(k), (count, k)),
        scratch_bits=leaves.bits | own,
        moves=jnp.zeros((2, 1), jnp.int32),
        keys=keys,
        features=features,
    )


def _next(rows: StepInputs, tokens: jax.Array, scores: jax.Array, first: int) -> _Beam:
    """The beam of the next level.

    rows: that made the candidates. tokens, scores: of candidates, [S, K * K]; first: flat number of the first
    """
    k = rows.tokens.shape[1]
    best, places = lax.top_k(scores, k)
    above = places // k
    leaves = Leaves(
        jnp.take_along_axis(tokens, places, axis=1),
        jnp.take_along_axis(rows.slots, above, axis=1),
        jnp.take_along_axis(rows.scratch_bits, above[..., None], axis=1),
    )
    return _Beam(leaves, first + places, best)


def _chosen(nodes: Nodes, scores: jax.Array, count: int) -> Nodes:
    """The best of all candidates, by flat number. scores: of paths, [S, C]."""
    flat = jnp.sort(lax.top_k(scores, count)[1], axis=1)
    tokens, parents, edges = (jnp.take_along_axis(part, flat, axis=1) for part in nodes)
    places = jax.vmap(jnp.searchsorted)(flat, parents).astype(jnp.int32)
    return Nodes(tokens, jnp.where(parents < 0, -1, places), edges)
