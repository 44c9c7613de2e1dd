"""The parts of a draft model as frozen dataclasses, which are static arguments of the compiled programs.

    ModelConfig   vocabulary, context length, one Layer after another, and the head with the input fusion and final norm
    Layer         attention, feed-forward part, norms
    Head          heads.py

Format readers (services/draft/formats) make these from config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import ConfigError
from services.draft.model.layers.heads import Head
from services.draft.model.layers.rope import Rope, rope_of

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. width: size of its input.

    gated:  each head's output is multiplied by the sigmoid of a gate, which is projected together with the query
    head_gate: the gate is one number a head, published as a projection of its own
    scale:  of the scores, by default 1 / sqrt(head_dim)
    window: tokens that a row attends to, itself included; default all. Draft rows attend to their whole path
    sinks:  each head has an additional key without a value, with a learned score
    first:  rows of the prefix KV before it are not visible; layers that predict further ahead have none there
    value_dim, value_scale: size of published values, narrower than keys, and the factor to multiply them by
    rope:   None for layers without positions
    softcap: bound of the scores by tanh
    cached_dim: size of a head in the cache, by default head_dim; the rest is zeros
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    head_gate: bool = False
    scale: float | None = None
    window: int | None = None
    sinks: bool = False
    first: int = 0
    value_dim: int | None = None
    value_scale: float = 1.0
    softcap: float | None = None
    cached_dim: int | None = None

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Shape of a row in the cache: keys and values side by side."""
        return 2, self.kv_heads, self.cached_dim or self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): keys and values of all heads come from one latent vector a token.

    The projections from the latent vector to keys and values are moved to the side of queries and outputs, so that the
    cache keeps only the latent vector and the rotated key, which all heads read.

    width: size of its input; query_rank: size of the query's latent vector, 0 without one; rank: size of the latent
    vector; plain_dim, rotary_dim: of a head's query; value_dim: of a head's value; scale: of scores
    interleaved: pairs that are rotated together are published side by side
    cached_dim: size of a row in the cache, by default rank + rotary_dim; the rest is zeros
    """

    width: int
    heads: int
    query_rank: int
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    rope: Rope
    scale: float
    bias: bool = False
    interleaved: bool = True
    cached_dim: int | None = None

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Shape of a row in the cache: one vector, key and value of every head."""
        return 1, 1, self.cached_dim or self.rank + self.rotary_dim


@dataclass(frozen=True)
class Mlp:
    """Gated feed-forward part. width: size between gate and down projection. activation: of the gate."""

    width: int
    bias: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, of which a router chooses a few for each row.

    count, width:  number and width of the experts
    chosen:        experts a row, by the sigmoid of the router's logits plus a bias, or by their softmax
    shared:        width of the shared expert, which processes every row; 0 without one
    groups, kept:  experts are chosen among the best `kept` groups
    normed:        weights of the chosen experts add up to 1
    scaling:       of the weights
    shared_gate:   the shared expert's output is multiplied by the sigmoid of a gate
    joined:        published as one tensor of all experts
    all_computed:  every expert computes, also those that no row has chosen, for training
    """

    count: int
    width: int
    chosen: int
    shared: int = 0
    sigmoid: bool = False
    groups: int = 1
    kept: int = 1
    normed: bool = True
    scaling: float = 1.0
    shared_gate: bool = False
    joined: bool = False
    all_computed: bool = False


@dataclass(frozen=True)
class Layer:
    """A decoder layer: x + attention(norm(x)), then the same with the feed-forward part.

    input_norm: the input of attention is normed
    beside:     the input of attention is [norm(embedding); norm(x)], twice as wide (EAGLE-3)
    residual_after_norm: the residual of attention is the normed input
    output_norms: outputs of attention and feed-forward part are normed, too (Gemma 2, 3)
    """

    attention: Attention | LatentAttention
    mlp: Mlp | Experts
    epsilon: float
    input_norm: bool = True
    beside: bool = False
    residual_after_norm: bool = False
    output_norms: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a draft model. Sizes count elements; `context` counts tokens.

    vocab_size: entries of the head; where they are not the target's ids, params["ids"] maps them
    stacked:    each layer predicts a token further from the target's features (stacked.py), instead of processing the
                output of the layer before
    chained:    stacked layers but the first read the state of the layer before, one row back, instead of the target's
    own_heads:  each stacked layer has an output layer of its own; they stand below one another in params["head"]
    softcap: bound of the logits by tanh
    factor:  of the logits, applied before the softcap
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    context: int
    head: Head
    tied_head: bool = False
    stacked: bool = False
    chained: bool = False
    own_heads: bool = False
    eos_token_ids: tuple[int, ...] = ()
    softcap: float | None = None
    factor: float = 1.0

    def cache_numbers(self) -> int:
        """Elements that the caches keep for a token."""
        kept = sum(math.prod(layer.attention.kv_shape) for layer in self.layers)
        states = int(self.head.keeps_states) + self.chain_links
        return kept + states * self.hidden_size

    @property
    def chain_links(self) -> int:
        """States of stacked layers that a token's row keeps for the next layer."""
        return len(self.layers) - 1 if self.chained else 0


# --- keys of config.json that many formats share ---


def attention_of(raw: dict[str, Any], *, width: int | None = None, **options: Any) -> Attention:
    """Grouped-query attention of a Llama-like config.json. width: of its input, by default the hidden size."""
    heads = raw["num_attention_heads"]
    if "rope" not in options:
        options["rope"] = rope_of(raw)
    return Attention(
        width=width or raw["hidden_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        **options,
    )


def eos_of(raw: dict[str, Any]) -> tuple[int, ...]:
    """Ids of end-of-sequence tokens."""
    eos = raw.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def check_activation(raw: dict[str, Any]) -> None:
    """Raise ConfigError unless the activation of the feed-forward part is SiLU."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"the draft model's activation {activation!r} is not supported; expected 'silu'")
