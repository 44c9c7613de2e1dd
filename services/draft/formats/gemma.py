"""Configurations of Gemma, Gemma 2 and Gemma 3 (text).

All scale embeddings by sqrt(hidden size), multiply norms by 1 + weight, and tie the head to the embedding.

    Gemma 2    norms also behind attention and feed-forward part; softcapped scores and logits; full attention in every
               second layer
    Gemma 3    norms as in 2, also of queries and keys; five sliding-window layers, then one with full attention and
               another RoPE base
"""

from __future__ import annotations

from typing import Any

from outrider.errors import ConfigError
from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of, eos_of
from services.draft.model.layers.heads import TokenHead
from services.draft.model.layers.rope import Rope, rope_of

_SLIDES = "sliding_attention"
_PERIOD = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6}  # the last layer of each period has full attention
_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
# Keys that configurations of multimodal Gemma 3 leave out of their text part.
_DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
    "max_position_embeddings": 131_072, "sliding_window": 4096, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip


def describe_gemma3_text(raw: dict[str, Any], architecture: str) -> ModelConfig:
    """The text part of a multimodal Gemma 3. Raises as `describe_gemma`."""
    del architecture
    above = {key: raw[key] for key in ("eos_token_id", "tie_word_embeddings") if key in raw}
    return describe_gemma(_DEFAULTS | above | raw["text_config"], "Gemma3ForCausalLM")


def describe_gemma(raw: dict[str, Any], architecture: str) -> ModelConfig:
    """Raises ConfigError for unsupported options, KeyError for a missing key."""
    _check(raw)
    period = int(raw.get("sliding_window_pattern") or _PERIOD.get(architecture, 0))
    later = architecture in _PERIOD
    epsilon, hidden = raw.get("rms_norm_eps", 1e-6), raw["hidden_size"]
    layers = []
    for i in range(raw["num_hidden_layers"]):
        named = (raw.get("layer_types") or {i: _SLIDES if period and (i + 1) % period else ""})[i]
        slides = later and named == _SLIDES
        bias = bool(raw.get("attention_bias", False))
        attention = attention_of(
            {"head_dim": 256} | raw,
            rope=_rope(raw, slides) if architecture == "Gemma3ForCausalLM" else rope_of(raw),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=architecture == "Gemma3ForCausalLM",
            scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5 if later else None,
            window=int(raw.get("sliding_window") or 4096) if slides else None,
            softcap=raw.get("attn_logit_softcapping", 50.0) if architecture == "Gemma2ForCausalLM" else None,
        )
        mlp = Mlp(raw["intermediate_size"], activation="gelu_tanh")
        layers.append(Layer(attention, mlp, epsilon, output_norms=later))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        layers=tuple(layers),
        context=int(raw.get("max_position_embeddings", 8192)),
        head=TokenHead(epsilon, scale=hidden**0.5),
        tied_head=bool(raw.get("tie_word_embeddings", True)),
        eos_token_ids=eos_of(raw),
        softcap=raw.get("final_logit_softcapping", 30.0 if architecture == "Gemma2ForCausalLM" else None),
    )


def _rope(raw: dict[str, Any], slides: bool) -> Rope:
    """Newer configurations have RoPE parameters by layer type; in older ones only the global RoPE is scaled."""
    both = raw.get("rope_parameters") or {}
    if own := both.get(_SLIDES if slides else "full_attention"):
        return rope_of(raw | {"rope_parameters": own, "rope_scaling": None})
    if slides:
        return Rope(float(raw.get("rope_local_base_freq") or _LOCAL_THETA))
    return rope_of({"rope_theta": _GLOBAL_THETA} | raw)


def _check(raw: dict[str, Any]) -> None:
    # Early Gemma files have "gelu", which means the same.
    activation = raw.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ConfigError(f"the draft model's activation {activation!r} is not supported; expected 'gelu_pytorch_tanh'")
    if raw.get("use_bidirectional_attention"):
        raise ConfigError("the draft model attends bidirectionally (use_bidirectional_attention); it cannot draft")
