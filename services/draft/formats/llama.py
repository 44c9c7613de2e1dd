"""Configurations of Llama, Mistral, Qwen2, Qwen3 and SmolLM3.

biases     Qwen2 has them at queries, keys and values; the others where config.json says so
windows    Mistral's layers see as many tokens, if it names a number; those of Qwen that it says, or the last ones
positions  are not told in every fourth layer of SmolLM3
"""

from __future__ import annotations

from typing import Any

from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of, check_activation, eos_of
from services.draft.model.layers.heads import TokenHead
from services.draft.model.layers.rope import rope_of

_ALWAYS_SLIDES = "MistralForCausalLM"


def describe_llama(raw: dict[str, Any], architecture: str) -> ModelConfig:
    """Raises ConfigError for what cannot be computed, KeyError for a key that is missing."""
    check_activation(raw)
    bias = bool(raw.get("attention_bias", False))
    qwen2 = architecture == "Qwen2ForCausalLM"
    epsilon = raw.get("rms_norm_eps", 1e-6)
    told = _told_positions(raw, architecture)
    rope = rope_of(raw)

    def layer(i: int) -> Layer:
        attention = attention_of(
            raw,
            rope=rope if told[i] else None,
            qkv_bias=bias or qwen2,
            output_bias=bias and not qwen2,
            qk_norm=architecture == "Qwen3ForCausalLM",
            window=_window(raw, architecture, i, told[i]),
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


def _told_positions(raw: dict[str, Any], architecture: str) -> list[bool]:
    """For each layer whether it is told positions."""
    layers = range(raw["num_hidden_layers"])
    if architecture != "SmolLM3ForCausalLM":
        return [True for _ in layers]
    every = raw.get("no_rope_layer_interval", 4)
    named = raw.get("no_rope_layers") or [(i + 1) % every != 0 for i in layers]  # 1 for a layer that has them
    return [bool(named[i]) for i in layers]


def _window(raw: dict[str, Any], architecture: str, layer: int, told: bool) -> int | None:
    window = raw.get("sliding_window")
    if not window or not (architecture == _ALWAYS_SLIDES or raw.get("use_sliding_window")):
        return None
    if types := raw.get("layer_types"):
        slides = types[layer] == "sliding_attention"
    elif architecture == "SmolLM3ForCausalLM":
        slides = not told
    else:
        slides = architecture == _ALWAYS_SLIDES or layer >= raw.get("max_window_layers", 28)
    return int(window) if slides else None
