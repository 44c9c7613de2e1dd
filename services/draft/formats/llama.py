"""Configurations of Llama, Mistral, Qwen2, Qwen3 and SmolLM3.

biases      Qwen2: queries, keys and values; the others as config.json sets them
windows     Mistral: all layers, if config.json has a window; Qwen: the layers that config.json names, or the last ones
positions   SmolLM3: every fourth layer has no positional encoding
"""

from __future__ import annotations

from typing import Any

from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of, check_activation, eos_of
from services.draft.model.layers.heads import TokenHead
from services.draft.model.layers.rope import rope_of

_ALWAYS_SLIDES = "MistralForCausalLM"


def describe_llama(raw: dict[str, Any], architecture: str) -> ModelConfig:
    """Raises ConfigError for unsupported options, KeyError for a missing key."""
    check_activation(raw)
    bias = bool(raw.get("attention_bias", False))
    qwen2 = architecture == "Qwen2ForCausalLM"
    epsilon = raw.get("rms_norm_eps", 1e-6)
    positional = _positional_layers(raw, architecture)
    rope = rope_of(raw)

    def layer(i: int) -> Layer:
        attention = attention_of(
            raw,
            rope=rope if positional[i] else None,
            qkv_bias=bias or qwen2,
            output_bias=bias and not qwen2,
            qk_norm=architecture == "Qwen3ForCausalLM",
            window=_window(raw, architecture, i, positional[i]),
        )
        return Layer(attention, Mlp(raw["intermediate_size"], bool(raw.get("mlp_bias", False))), epsilon)

    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        layers=tuple(map(layer, range(raw["num_hidden_layers"]))),
        context=int(raw.get("max_position_embeddings", 2048)),
        head=TokenHead(epsilon),
        tied_head=bool(raw.get("tie_word_embeddings", architecture == "SmolLM3ForCausalLM")),
        eos_token_ids=eos_of(raw),
    )


def _positional_layers(raw: dict[str, Any], architecture: str) -> list[bool]:
    """For each layer, True if it has rotary position embeddings."""
    layers = range(raw["num_hidden_layers"])
    if architecture != "SmolLM3ForCausalLM":
        return [True for _ in layers]
    every = raw.get("no_rope_layer_interval", 4)
    named = raw.get("no_rope_layers") or [(i + 1) % every != 0 for i in layers]  # 1 for a layer with RoPE
    return [bool(named[i]) for i in layers]


def _window(raw: dict[str, Any], architecture: str, layer: int, positional: bool) -> int | None:
    window = raw.get("sliding_window")
    if not window or not (architecture == _ALWAYS_SLIDES or raw.get("use_sliding_window")):
        return None
    if types := raw.get("layer_types"):
        slides = types[layer] == "sliding_attention"
    elif architecture == "SmolLM3ForCausalLM":
        slides = not positional
    else:
        slides = architecture == _ALWAYS_SLIDES or layer >= raw.get("max_window_layers", 28)
    return int(window) if slides else None
