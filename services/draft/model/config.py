"""What a draft model is made of, as frozen dataclasses: they are static arguments of the compiled programs.

    ModelConfig   vocabulary, context, one Layer after another, and the head that joins its input and ends it
    Layer         attention, feed-forward part, norms
    Head          model/heads.py

Readers of published formats (model/formats/) make these from config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from services.draft.model.heads import Head


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
class Attention:
    """Grouped-query attention. width: numbers that its projections take."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """What the cache keeps of a row: keys and values side by side."""
        return 2, self.kv_heads, self.head_dim


@dataclass(frozen=True)
class Mlp:
    """Gated feed-forward part. width: numbers between gate and down projection."""

    width: int
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    """A decoder layer: x + attention(norm(x)), then the same with the feed-forward part.

    input_norm: attention gets its input through a norm
    beside:     attention gets [norm(embedding); norm(x)], twice as wide (EAGLE-3)
    residual_after_norm: what attention's output is added to has been through the input's norm
    """

    attention: Attention
    mlp: Mlp
    epsilon: float
    input_norm: bool = True
    beside: bool = False
    residual_after_norm: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a draft model. Sizes count elements; `context` counts tokens.

    vocab_size: ids that the head gives logits of; where they are not the target's ids, params["ids"] translates
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    context: int
    head: Head
    tied_head: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def cache_numbers(self) -> int:
        """Numbers that the caches keep a token."""
        kept = sum(math.prod(layer.attention.kv_shape) for layer in self.layers)
        return kept + (self.hidden_size if self.head.fed else 0)


# --- parts of config.json that many formats share ---


def attention_of(raw: dict[str, Any], *, width: int | None = None, **options: Any) -> Attention:
    """Grouped-query attention of a Llama-like config.json. width: of its input, by default the hidden size."""
    heads = raw["num_attention_heads"]
    return Attention(
        width=width or raw["hidden_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rope=rope_of(raw),
        **options,
    )


def rope_of(raw: dict[str, Any]) -> Rope:
    """The rotary embedding of a config.json. Raises ConfigError for a kind that is not supported."""
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


def eos_of(raw: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a text."""
    eos = raw.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def check_activation(raw: dict[str, Any]) -> None:
    """Raise ConfigError unless the feed-forward part's activation is the one that is built."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"the draft model's activation {activation!r} is not supported; expected 'silu'")
