"""A local EAGLE-3 head: one decoder layer in the target's process that drafts for a compiled program.

The program stores three hidden states of every token in the cache (`States`); the head fuses them and writes keys and
values of its own into an extra layer of the cache. Its row for position j takes the token at j + 1.

It suits machines where a draft service would share the target's cores: it needs no process, no stream and no copy of
the states. Heads with biases, further norms or more than one layer need the draft service.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.checkpoints.eagle3 import DEFAULT_STATES
from services.target.kernels.cpu.library import AttentionShape
from services.target.kernels.cpu.matrices.weights import Format, PackedWeight, packed
from services.target.kernels.cpu.programs.program import Activation, Buffer, Program
from services.target.kernels.cpu.sampling import HeadDraftTokens
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import States
from services.target.model.eagle_head_weights import LAYER, EagleHeadWeights
from services.target.model.linear import plain_format
from services.target.step.batch import Batch


class EagleHead:
    """A head that runs beside a program. shape: of its layer in the cache; states: hidden states that the cache stores.

    bytes: of weights that the draft of one token reads
    """

    def __init__(
        self, weights: EagleHeadWeights, beside: Program, threads: int, table: Tensor | PackedWeight,
        computed: torch.dtype, pools: torch.dtype, depth: int, positions: int,
    ) -> None:  # fmt: skip
        """table: the model's embedding, [V, H]. computed: format of the computation. depth: layers of the model.

        pools: format of the cache; positions: most tokens of a session
        """
        vocab, hidden = (table.outputs, table.inputs) if isinstance(table, PackedWeight) else table.shape
        self.shape = weights.shape
        self.states = States(DEFAULT_STATES * hidden, computed)
        self.program = program = Program(threads, computed, pools, hidden, beside=beside)
        fc = packed(weights.tensors["fc.weight"], plain_format(computed) or Format.FLOAT32)
        projections = weights.packed(*(f"{LAYER}self_attn.{name}_proj" for name in "qkv"))
        output, down = weights.packed(LAYER + "self_attn.o_proj"), weights.packed(LAYER + "mlp.down_proj")
        gates, head = weights.gates(), weights.packed("lm_head")
        self.bytes = sum(part.bytes for part in (projections, output, gates, down, head))
        program.load_state(self.states.width)
        program.linear(fc, Buffer.HIDDEN, Buffer.RESIDUAL)
        join = weights.norm(LAYER + "input_layernorm"), weights.norm(LAYER + "hidden_norm")
        program.join_embedding(table, *join, after_norm=weights.after_norm)
        program.linear(projections, Buffer.HIDDEN, Buffer.WIDE)
        dim = weights.head_dim
        attention = AttentionShape(weights.heads, weights.kv_heads, dim, dim, dim**-0.5, 0, 0.0, None)
        program.attend(depth, attention, *weights.rotary_tables(positions))
        program.linear(output, Buffer.ATTENDED, Buffer.RESIDUAL, add=True)
        norm = weights.norm(LAYER + "post_attention_layernorm")
        program.linear(gates, Buffer.RESIDUAL, Buffer.HIDDEN, norm=norm, activation=Activation.SILU)
        program.linear(down, Buffer.HIDDEN, Buffer.RESIDUAL, add=True)
        ids = None if len(weights.ids) == vocab else torch.from_numpy(weights.ids.astype(np.int32))
        program.head(head, weights.norm("norm"), ids=ids)

    def draft(self, batch: Batch, cache: KVCache) -> HeadDraftTokens:
        """Draft a chain for each session of a batch; see `Program.draft_chain`."""
        return self.program.draft_chain(batch, cache)
