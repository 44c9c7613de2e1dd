"""The two compiled programs: a step of the model, and the copying of slots. Both donate the pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from outrider.speculation.shape import TreeShape
from services.draft.kernels.base import Context, Paging
from services.draft.kernels.cpu.candidates import cpu_candidates
from services.draft.model.layers.block import block_states, context_pools
from services.draft.model.layers.config import ModelConfig
from services.draft.model.layers.decoder import Features, Forward, Rows, all_logits, head, hidden_states
from services.draft.model.layers.heads import BlockHead, ParallelHead
from services.draft.model.layers.kv_cache import Pools, move_rows
from services.draft.model.layers.parallel import parallel_states
from services.draft.model.layers.stacked import stacked_states
from services.draft.model.parallel.mesh import MeshPlacement
from services.draft.model.params import Params
from services.draft.model.programs.best_first import grow_best_first
from services.draft.model.programs.block import block_keys, block_rows, selected
from services.draft.model.programs.rounds import grow_rounds
from services.draft.model.programs.sampling import Sampling, candidates
from services.draft.model.programs.whole_tree import grow_tree
from services.draft.sessions.batch import Block, Growth, InputLayout, Rounds, StepInputs


class Constants(NamedTuple):
    """Static arguments of a program, besides shapes. children: candidates a row; vocab_limit: ids from there on are
    padding.

    spread: placement of the model on several devices, or None; `config` is then a device's part of it
    """

    config: ModelConfig
    paging: Paging
    children: int
    vocab_limit: int
    placement: MeshPlacement | None = None


# Of parameters, pools and inputs: ids, perhaps parents and places, and log-scores; and the pools.
Compute = Callable[[Params, Pools, StepInputs], tuple[Iterable[jax.Array], Pools]]


def step(
    constants: Constants, layout: InputLayout, params: Params, pools: Pools, words: jax.Array, features: jax.Array
) -> tuple[jax.Array, Pools]:
    """One step. DONATES pools. words: inputs in the layout's order; features: the target's.

    Returns candidates and the bits of their log-scores, [2, S, R, children] int32, and the pools; with blocks R are the
    predicted positions. With trees: tokens, parents, of adaptive trees places in the scratch, and the bits of
    log-scores, [3 or 4, S, nodes] int32.
    """
    inputs = layout.inputs(words, features, jax.lax.bitcast_convert_type)
    tree = layout.shape.tree
    compute: Compute = partial(_step, constants) if tree is None else partial(_grown, constants, tree)
    if constants.placement is None:
        results, pools = compute(params, pools, inputs)
    else:
        results, pools = constants.placement.step(compute, params, pools, inputs)
    *ids, log_scores = results
    return jnp.stack([*ids, jax.lax.bitcast_convert_type(log_scores, jnp.int32)]), pools


@cache
def compiled_step(constants: Constants, layout: InputLayout) -> Any:
    """`step` of these static arguments as a compiled function of the others.

    A function of its own for each, because hashing the arguments at every call takes longer than its dispatch.
    """
    # The compiled kernels do nearly all of the work on CPUs; XLA's own threads are not worth waking.
    options = {"xla_cpu_multi_thread_eigen": False} if constants.paging.backend == "cpu" else None
    return jax.jit(partial(step, constants, layout), donate_argnums=1, compiler_options=options)


def _step(
    constants: Constants, params: Params, pools: Pools, inputs: StepInputs
) -> tuple[tuple[jax.Array, jax.Array], Pools]:
    if isinstance(constants.config.head, BlockHead):
        shape = (*inputs.head_rows.shape, constants.children)
        nothing = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        return nothing, context_pools(forward_of(constants, params, pools, inputs))
    x, pools = states(constants, params, pools, inputs)
    x = jnp.take_along_axis(x, inputs.head_rows[..., None], axis=1)  # [S, R, H]
    return _candidates(constants, params, x, inputs, inputs.keys), pools


def _candidates(
    constants: Constants, params: Params, x: jax.Array, inputs: StepInputs, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Candidates and their log-scores, [S, R, children] each. x: [S, R, H], behind the head; keys: [S, R, 2]."""
    sampling = Sampling(inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, keys)
    if constants.paging.backend == "cpu":
        logits = all_logits(params, x, constants.config.softcap, constants.config.factor)
        return cpu_candidates(logits, sampling, constants.children, params.get("ids"), constants.vocab_limit)
    logits = head(params, x, constants.vocab_limit, constants.config.softcap, constants.config.factor)
    return candidates(logits, sampling, constants.children, params.get("ids"))


def _block(
    constants: Constants, block: Block, params: Params, pools: Pools, inputs: StepInputs
) -> tuple[tuple[jax.Array, jax.Array], Pools]:
    if isinstance(constants.config.head, ParallelHead):
        forward = forward_of(constants, params, pools, inputs)
        x, pools = parallel_states(forward, inputs.head_rows, block.steps - 1)
        return _candidates(constants, params, x, inputs, block_keys(inputs)), pools
    assert isinstance(constants.config.head, BlockHead)
    rows = block_rows(block, constants.config.head, inputs)
    x, pools = block_states(forward_of(constants, params, pools, inputs), rows)
    count, keys = constants.config.head.selector, block_keys(inputs)
    if not count:
        return _candidates(constants, params, x[:, 1:], inputs, keys), pools
    found = _candidates(constants._replace(children=count), params, x[:, 1:], inputs, keys)
    sampling = Sampling(inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, keys)
    return selected(params, x[:, 1:], rows.tokens[:, 0], *found, sampling, min(constants.children, count)), pools


def _grown(
    constants: Constants, tree: TreeShape | Growth | Rounds | Block, params: Params, pools: Pools, inputs: StepInputs
) -> tuple[Iterable[jax.Array], Pools]:
    if isinstance(tree, Block):
        return _block(constants, tree, params, pools, inputs)
    compute = partial(_step, constants, params)
    if isinstance(tree, Growth):
        return grow_best_first(tree, compute, pools, inputs)
    if isinstance(tree, Rounds):
        return grow_rounds(tree, compute, pools, inputs)
    return grow_tree(tree, compute, pools, inputs)


def states(constants: Constants, params: Params, pools: Pools, inputs: StepInputs) -> tuple[jax.Array, Pools]:
    """The states that a step's logits are computed from, [S, Q, H], and the pools."""
    compute = stacked_states if constants.config.stacked else hidden_states
    return compute(forward_of(constants, params, pools, inputs))


def forward_of(constants: Constants, params: Params, pools: Pools, inputs: StepInputs) -> Forward:
    """The model and the rows of a step, for the functions that compute its layers."""
    bits = inputs.scratch_bits[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1  # [S, Q, words, 32]
    mask = bits.reshape(*inputs.tokens.shape, -1).astype(bool)
    context = Context(inputs.pages, inputs.visible, inputs.scratch_slots, mask)
    features = None
    if inputs.features is not None:
        uses_features = inputs.features
        features = Features(
            uses_features.rows, uses_features.given.astype(bool), uses_features.sources, uses_features.layers
        )
    rows = Rows(inputs.tokens, inputs.positions, inputs.slots, features)
    return Forward(params, constants.config, pools, rows, context, inputs.moves, constants.paging)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def move(placement: MeshPlacement | None, pools: Pools, moves: jax.Array) -> Pools:
    """Copy slots in every pool. DONATES pools. moves: [2, M] int32, sources and targets."""
    return _move(pools, moves) if placement is None else placement.change(_move, pools, moves)


def _move(pools: Pools, moves: jax.Array) -> Pools:
    moved: Pools = jax.tree.map(lambda pool: move_rows(pool, moves[0], moves[1]), pools)
    return moved
