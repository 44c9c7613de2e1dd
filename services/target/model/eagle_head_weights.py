"""Reading the checkpoint of a local EAGLE-3 head: its configuration, its tensors, and whether they fit the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from outrider.checkpoints.checkpoint import weight_files
from outrider.checkpoints.config_json import load_config, values_of
from outrider.checkpoints.eagle3 import DEFAULT_STATES, flat, is_speculators, layer_ids, plain_name, target_ids
from outrider.errors import ConfigError
from services.target.kernels.cpu.attention.paged import serves
from services.target.kernels.cpu.matrices.weights import Format, PackedWeight, interleaved, packed
from services.target.kernels.cpu.programs.program import Norm
from services.target.kernels.cpu.programs.rotary import Rotary, UnknownRotary, rope_parameters
from services.target.kernels.pools import LayerShape

FORMAT = Format.INT4
"""The number format of the head's weights; more bits do not raise the accept length."""
_NOT_READ = {"embed_tokens.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
LAYER = "layers.0."
"""Prefix of the tensor names of the head's only layer."""
# Settings that define the rotary embedding.
_ROPE = ("hidden_size", "num_attention_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class EagleHeadWeights:
    """A checkpoint of an EAGLE-3 head.

    layers: target layers whose inputs it reads; epsilon: of its norms; after_norm: the normalised state replaces the
    residual stream; ids: [outputs], ascending target token ids of its outputs
    """

    tensors: dict[str, Tensor]
    layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    after_norm: bool
    ids: NDArray[np.int64]
    rope: Any

    @property
    def shape(self) -> LayerShape:
        """What the head's layer stores for a token."""
        return LayerShape(self.kv_heads, self.head_dim, self.head_dim)

    def norm(self, name: str) -> Norm:
        """A norm, as programs take it."""
        return Norm(self.tensors[name + ".weight"].float(), self.epsilon)

    def packed(self, *names: str) -> PackedWeight:
        """Weights packed one below another."""
        return packed(torch.cat([self.tensors[name + ".weight"] for name in names]), FORMAT)

    def gates(self) -> PackedWeight:
        """Gates and values of the feed-forward layer, alternating as programs take them."""
        gate, value = (self.tensors[f"{LAYER}mlp.{name}_proj.weight"] for name in ("gate", "up"))
        weight = PackedWeight(2 * -(-len(gate) // 16) * 16, gate.shape[1], FORMAT)
        for part, rows in enumerate((gate, value)):
            weight.fill(interleaved(len(rows), part), rows)
        return weight

    def rotary_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions 0 .. positions - 1, [positions, head_dim / 2] float32 each."""
        cosines, sines = self.rope(torch.empty(0), torch.arange(positions)[None])
        half = cosines.shape[2] // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()


def read_eagle_head(folder: Path, depth: int, hidden: int, vocab: int, positions: int) -> EagleHeadWeights:
    """Read a folder's head for a model with `depth` layers. Raises ConfigError if it does not fit the model.

    hidden, vocab: of the model; positions: most tokens of a session
    """
    raw = load_config(folder)
    with values_of(folder / "config.json"):
        return _read_head(folder, raw, depth, hidden, vocab, positions)


def _read_head(
    folder: Path, raw: dict[str, Any], depth: int, hidden: int, vocab: int, positions: int
) -> EagleHeadWeights:
    speculators, facts = is_speculators(raw), flat(raw)
    _check(folder, facts, hidden, vocab)
    layers = layer_ids(facts, speculators=speculators) or (2, depth // 2, depth - 3)
    proper = (
        len(set(layers)) == DEFAULT_STATES and layers == tuple(sorted(layers)) and 0 <= layers[0] <= layers[-1] <= depth
    )
    if not proper or facts.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{folder}: its {DEFAULT_STATES} states must be of layers up to {depth}, not {list(layers)}")
    tensors = _read(folder)
    heads = facts["num_attention_heads"]
    kv_heads = facts.get("num_key_value_heads") or heads
    head_dim = facts.get("head_dim") or hidden // heads
    if heads % kv_heads or not serves(torch.float32, head_dim, head_dim):
        shape = f"{heads} heads of {head_dim} numbers over {kv_heads} of keys"
        raise ConfigError(f"{folder}: there is no kernel for {shape}")
    entries = facts.get("draft_vocab_size") or vocab
    _check_shapes(
        folder, tensors,
        {
            "fc.weight": (hidden, DEFAULT_STATES * hidden),
            "norm.weight": (hidden,),
            "lm_head.weight": (entries, hidden),
            LAYER + "hidden_norm.weight": (hidden,),
            LAYER + "input_layernorm.weight": (hidden,),
            LAYER + "post_attention_layernorm.weight": (hidden,),
            LAYER + "self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
            LAYER + "self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
            LAYER + "self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
            LAYER + "self_attn.o_proj.weight": (hidden, heads * head_dim),
            LAYER + "mlp.gate_proj.weight": (facts["intermediate_size"], hidden),
            LAYER + "mlp.up_proj.weight": (facts["intermediate_size"], hidden),
            LAYER + "mlp.down_proj.weight": (hidden, facts["intermediate_size"]),
        },
    )  # fmt: skip
    offsets = tensors.pop("d2t", None)
    ids = np.arange(vocab) if offsets is None else target_ids(offsets.numpy(), vocab)
    if ids is None or len(ids) != entries:
        raise ConfigError(f"{folder}: d2t does not say which of the target's {vocab} tokens its {entries} entries are")
    order = np.argsort(ids)
    ids, tensors["lm_head.weight"] = ids[order], tensors["lm_head.weight"][torch.from_numpy(order)]
    rope = _rope(facts, head_dim, positions)
    after_norm = bool(facts.get("norm_before_residual", speculators))
    epsilon = float(facts.get("rms_norm_eps", 1e-6))
    return EagleHeadWeights(tensors, layers, heads, kv_heads, head_dim, epsilon, after_norm, ids, rope)


def _rope(facts: dict[str, Any], head_dim: int, positions: int) -> Any:
    """The rotary embedding. `transformers`, which takes seconds to import, has the unusual ones."""
    try:
        return Rotary(rope_parameters(facts), head_dim)
    except UnknownRotary:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    names = {name for name in _ROPE if facts.get(name) is not None}
    return LlamaRotaryEmbedding(LlamaConfig(**{name: facts[name] for name in names} | {
        "max_position_embeddings": max(positions, facts.get("max_position_embeddings", 0))
    }))  # fmt: skip


def _check(folder: Path, facts: dict[str, Any], hidden: int, vocab: int) -> None:
    found = {
        "vocab_size": (facts.get("vocab_size"), vocab),
        "hidden_size": (facts.get("hidden_size"), hidden),
        "target_hidden_size": (facts.get("target_hidden_size") or hidden, hidden),
        "num_hidden_layers": (facts.get("num_hidden_layers", 1), 1),
        "hidden_act": (facts.get("hidden_act", "silu"), "silu"),
        **{name: (bool(facts.get(name, False)), False) for name in ("attention_bias", "mlp_bias", "norm_output")},
    }
    for name, (value, wanted) in found.items():
        if value != wanted:
            raise ConfigError(f"{folder}: {name} is {value}; a head in the target's own process has {wanted}")


def _read(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (safe_open is no mapping)
                if (known := plain_name(name)) not in _NOT_READ:
                    tensors[known] = opened.get_tensor(name)
    return tensors


def _check_shapes(folder: Path, tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            found = list(tensors[name].shape) if name in tensors else "missing"
            raise ConfigError(f"{folder}: tensor {name} is {found}; {list(shape)} is expected")
    if spare := sorted(set(tensors) - set(shapes) - {"d2t"}):
        raise ConfigError(f"{folder}: a head in the target's own process has no {', '.join(spare[:3])}")
