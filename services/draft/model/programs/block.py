"""A pass of a block drafter as a program: context rows of a commit, and the block behind them.

The inputs are those of a commit's rows. The block follows from them: its root is the token of the last row, one
position further, and its rows take the first slots of the scratch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from services.draft.kernels.base import Context
from services.draft.model.layers.block import BlockRows
from services.draft.model.layers.heads import BlockHead
from services.draft.sessions.batch import Block, StepInputs


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
