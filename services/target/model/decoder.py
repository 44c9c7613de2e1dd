"""Dense decoders of `transformers` that have kernels of their own, and the differences between them.

The models are variations of one layer: RMS norm, attention with rotary embedding, RMS norm, a gated feed-forward layer.
The variations (biases, norms of queries and keys, norms after a branch, windows, two rotary embeddings, soft caps) are
read from the modules. Any other model runs module by module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
_SCALED_NORMS = ("gemma2", "gemma3_text")  # multiply with 1 + weight
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def unsupported_reason(module: Any) -> str | None:
    """Why a loaded model is not one of these decoders; None if it is."""
    config = module.config
    if config.model_type not in MODEL_TYPES:
        return f"there is no program for models of type {config.model_type}"
    if activation(config) not in _ACTIVATIONS:
        return f"there is no kernel for the activation {activation(config)}"
    if any(
        linear.bias is not None for layer in module.model.layers for linear in (layer.mlp.gate_proj, layer.mlp.up_proj)
    ):
        return "its feed-forward layers have biases"
    return None


def activation(config: Any) -> str:
    """The activation of the gates, by `transformers`' name."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


@dataclass(frozen=True)
class LayerModules:
    """The modules of a layer; None for a norm that the layer does not have.

    after_attention, after_feed_forward: norms of the branches' outputs
    """

    before_attention: nn.Module
    projections: tuple[Any, Any, Any]  # queries, keys, values
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    output: Any
    after_attention: nn.Module | None
    before_feed_forward: nn.Module
    gate: Any
    up: Any
    down: Any
    after_feed_forward: nn.Module | None


def parts(layer: Any) -> LayerModules:
    """The modules of a layer of `transformers`."""
    attention, mlp = layer.self_attn, layer.mlp
    four_norms = hasattr(layer, "pre_feedforward_layernorm")
    return LayerModules(
        layer.input_layernorm,
        (attention.q_proj, attention.k_proj, attention.v_proj),
        getattr(attention, "q_norm", None),
        getattr(attention, "k_norm", None),
        attention.o_proj,
        layer.post_attention_layernorm if four_norms else None,
        layer.pre_feedforward_layernorm if four_norms else layer.post_attention_layernorm,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        layer.post_feedforward_layernorm if four_norms else None,
    )


def norm_shift(config: Any) -> float:
    """The number added to a norm's weight before the product."""
    return 1.0 if config.model_type in _SCALED_NORMS else 0.0


def norm_epsilon(norm: Any) -> float:
    """A norm's epsilon, added to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def final_softcap(config: Any) -> float:
    """The soft cap of the logits; 0 for none."""
    return float(getattr(config, "final_logit_softcapping", None) or 0.0)


class RotaryTables:
    """Cosines and sines of the rotary embedding, one pair for all layers of a kind."""

    def __init__(self, module: Any, positions: int, device: torch.device | None = None) -> None:
        """positions: most tokens of a session."""
        self._rotary = module.model.rotary_emb
        kinds = getattr(module.config, "layer_types", None) or []
        self._kinds = kinds if module.config.model_type == "gemma3_text" else []
        self._positions = torch.arange(positions, device=device)[None]
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a layer, [positions, rotary dim / 2] float32 each."""
        kind = self._kinds[layer] if self._kinds else None
        if kind not in self._tables:
            like = torch.empty(0, device=self._positions.device)  # float32
            pair = self._rotary(like, self._positions, *([kind] if kind else []))
            cosines, sines = (side[0, :, : side.shape[2] // 2].contiguous() for side in pair)  # both halves are alike
            self._tables[kind] = (cosines, sines)
        return self._tables[kind]
