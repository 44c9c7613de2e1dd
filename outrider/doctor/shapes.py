"""Shapes of published models, from which memory is planned without their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider.checkpoints.sizes import ModelSizes, StoredTensor


@dataclass(frozen=True)
class ModelShape(ModelSizes):
    """A decoder with gated feed-forward layers in bfloat16. tied: the output layer is the embedding.

    own_vocab: entries of an EAGLE-3 head's own vocabulary; such a head has one layer, and no embedding
    """

    name: str
    hidden_size: int
    inner: int
    layer_count: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    positions: int = 131_072
    tied: bool = False
    own_vocab: int | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """As config.json of the checkpoint has it."""
        return {
            "dtype": "bfloat16", "hidden_size": self.hidden_size, "intermediate_size": self.inner,
            "num_hidden_layers": self.layer_count, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab_size,
            "max_position_embeddings": self.positions,
        }  # fmt: skip

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The matrices; norms are too small to count."""
        if self.own_vocab is not None:
            return self._head()
        embedding = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        output = {} if self.tied else {"lm_head.weight": (self.vocab_size, self.hidden_size)}
        layers = [self._layer(f"model.layers.{i}.", self.hidden_size) for i in range(self.layer_count)]
        shapes = {name: shape for part in (embedding, output, *layers) for name, shape in part.items()}
        return {name: StoredTensor("BF16", shape) for name, shape in shapes.items()}

    def _head(self) -> Mapping[str, StoredTensor]:
        """The tensors of an EAGLE-3 head, whose attention reads the embedding beside its state."""
        assert self.own_vocab is not None
        shapes = {
            "fc.weight": (self.hidden_size, 3 * self.hidden_size),
            "lm_head.weight": (self.own_vocab, self.hidden_size),
        }
        shapes |= self._layer("midlayer.", 2 * self.hidden_size)
        tensors = {name: StoredTensor("BF16", shape) for name, shape in shapes.items()}
        return tensors | {
            "d2t": StoredTensor("I64", (self.own_vocab,)),
            "t2d": StoredTensor("BOOL", (self.vocab_size,)),
        }

    def _layer(self, prefix: str, width: int) -> dict[str, tuple[int, int]]:
        """A layer's matrices. width: of attention's input."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            f"{prefix}self_attn.q_proj.weight": (queries, width),
            f"{prefix}self_attn.k_proj.weight": (keys, width),
            f"{prefix}self_attn.v_proj.weight": (keys, width),
            f"{prefix}self_attn.o_proj.weight": (self.hidden_size, queries),
            f"{prefix}mlp.gate_proj.weight": (self.inner, self.hidden_size),
            f"{prefix}mlp.up_proj.weight": (self.inner, self.hidden_size),
            f"{prefix}mlp.down_proj.weight": (self.hidden_size, self.inner),
        }


LLAMA_1B = ModelShape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, 128_256, tied=True)
LLAMA_8B = ModelShape("Llama-3.1-8B", 4096, 14_336, 32, 32, 8, 128, 128_256)
LLAMA_70B = ModelShape("Llama-3.1-70B", 8192, 28_672, 80, 64, 8, 128, 128_256)
QWEN_2B = ModelShape("Qwen3-1.7B", 2048, 6144, 28, 16, 8, 128, 151_936, 40_960, tied=True)
QWEN_32B = ModelShape("Qwen3-32B", 5120, 25_600, 64, 64, 8, 128, 151_936, 40_960)
# Heads in the shape that SpecForge and EAGLE's authors publish: a layer of the target's width, 32,000 tokens.
HEADS = {
    of: ModelShape(
        f"EAGLE-3 head of {of.name}", of.hidden_size, of.inner, 1, of.heads, of.kv_heads, of.head_dim, of.vocab_size,
        of.positions, own_vocab=32_000,
    )
    for of in (LLAMA_8B, QWEN_32B, LLAMA_70B)
}  # fmt: skip
