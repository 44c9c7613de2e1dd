"""What config.json says about a Llama-like decoder: Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.checkpoint import load_json
from outrider.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. kind: "default", "linear" or "llama3"; the last four matter to "llama3" alone."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Radians a position, one for each pair of dimensions. [head_dim / 2] float32."""
        inverse = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            inverse = self._llama3(inverse)
        return inverse.astype(np.float32)

    def _llama3(self, inverse: NDArray[np.float64]) -> NDArray[np.float64]:
        # Long waves are slowed down by the factor, short ones stay, those between are blended.
        waves = 2 * math.pi / inverse
        smooth = (self.original_context / waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * inverse / self.factor + smooth * inverse


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder. Sizes count elements; `context` counts tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    context: int
    rope: Rope
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint. Raises ConfigError for what this decoder cannot compute."""
    raw = load_json(folder / "config.json")
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{folder} holds a {architecture}; a draft model must be one of {', '.join(ARCHITECTURES)}. "
            "Choose another draft model, or --speculative-algorithm NGRAM"
        )
    try:
        return _from_raw(raw, architecture)
    except KeyError as error:
        raise ConfigError(f"{folder / 'config.json'} lacks {error}") from None


def _from_raw(raw: dict[str, Any], architecture: str) -> ModelConfig:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"the draft model's activation {activation!r} is not supported; expected 'silu'")
    heads = raw["num_attention_heads"]
    bias = bool(raw.get("attention_bias", False))
    qwen2 = architecture == "Qwen2ForCausalLM"
    eos = raw.get("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_epsilon=raw.get("rms_norm_eps", 1e-6),
        context=_context(raw, architecture),
        rope=_rope(raw),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or qwen2,
        output_bias=bias and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _context(raw: dict[str, Any], architecture: str) -> int:
    # Attention is over everything, so a sliding window bounds the context instead.
    context = int(raw.get("max_position_embeddings", 2048))
    window = raw.get("sliding_window")
    slides = architecture == "MistralForCausalLM" or bool(raw.get("use_sliding_window"))
    return min(context, int(window)) if slides and window else context


def _rope(raw: dict[str, Any]) -> Rope:
    scaling = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("the draft model rotates a part of each head only, which is not supported")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(scaling["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            float(scaling["factor"]),
            float(scaling["low_freq_factor"]),
            float(scaling["high_freq_factor"]),
            int(scaling["original_max_position_embeddings"]),
        )
    raise ConfigError(f"the draft model's rope type {kind!r} is not supported; expected default, linear or llama3")
