"""What a draft model is made of, as frozen dataclasses: they are static arguments of the compiled programs.

    ModelConfig   vocabulary, context, one Layer after another, and the head that joins its input and ends it
    Layer         attention, feed-forward part, norms
    Head          model/heads.py

Readers of published formats (model/formats/) make these from config.json.
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
    """Grouped-query attention. width: numbers that its projections take.

    gated:  a gate stands beside each head's query; what the head saw is multiplied by its sigmoid
    scale:  of the scores, by default 1 / sqrt(head_dim)
    window: tokens that a row sees, itself included; by default all. A drafted row sees its whole path
    sinks:  each head may look past all tokens, at nothing, with a score of its own
    first:  rows of the trunk before it are not seen; a layer that predicts further ahead has none there
    value_dim, value_scale: published values are narrower than keys, and are to be multiplied
    rope:   None where positions are not told
    softcap: bound of the scores, which tanh bends towards it
    cached_dim: numbers that the cache keeps of a head, by default head_dim; further ones are zeros
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
        """What the cache keeps of a row: keys and values side by side."""
        return 2, self.kv_heads, self.cached_dim or self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): keys and values of all heads are made from one latent vector a token.

    The projections from the latent vector to keys and values are moved to the query's and the output's side, so that
    the cache keeps the latent vector and the rotated key alone, and all heads read the same.

    width: numbers that its projections take; query_rank: numbers that the query goes through, 0 if it is made at once;
    rank: of the latent vector; plain_dim, rotary_dim: of a head's query; value_dim: of a head's value; scale: of scores
    interleaved: published rotated numbers stand in pairs side by side
    cached_dim: numbers that the cache keeps of a row, by default rank + rotary_dim; further ones are zeros
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
        """What the cache keeps of a row: one vector, which is key and value of every head."""
        return 1, 1, self.cached_dim or self.rank + self.rotary_dim


@dataclass(frozen=True)
class Mlp:
    """Gated feed-forward part. width: numbers between gate and down projection. activation: of the gate."""

    width: int
    bias: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True)
class Experts:
    """A mixture of gated feed-forward parts, of which a router gives each row a few.

    count, width:  of the experts; a shared one of `shared` numbers, 0 if there is none, takes every row
    chosen:        experts a row; by the sigmoid of the router's logits plus a bias, or by their softmax
    groups, kept:  experts are chosen among the best `kept` groups of them
    normed:        weights of the chosen experts add up to 1
    scaling:       of the weights
    shared_gate:   the shared expert's output is multiplied by the sigmoid of a number of the row's own
    joined:        published as one tensor of all experts
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


@dataclass(frozen=True)
class Layer:
    """A decoder layer: x + attention(norm(x)), then the same with the feed-forward part.

    input_norm: attention gets its input through a norm
    beside:     attention gets [norm(embedding); norm(x)], twice as wide (EAGLE-3)
    residual_after_norm: what attention's output is added to has been through the input's norm
    output_norms: what attention and the feed-forward part say goes through norms, too (Gemma 2, 3)
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

    vocab_size: ids that the head gives logits of; where they are not the target's ids, params["ids"] translates
    stacked:    each layer predicts a token further from the target's features (model/stacked.py); else they follow one
                another
    softcap: bound of the logits, which tanh bends towards it
    factor:  of the logits, before that
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    context: int
    head: Head
    tied_head: bool = False
    stacked: bool = False
    eos_token_ids: tuple[int, ...] = ()
    softcap: float | None = None
    factor: float = 1.0

    def cache_numbers(self) -> int:
        """Numbers that the caches keep a token."""
        kept = sum(math.prod(layer.attention.kv_shape) for layer in self.layers)
        return kept + (self.hidden_size if self.head.fed else 0)


# --- parts of config.json that many formats share ---


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
    """Ids that end a text."""
    eos = raw.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def check_activation(raw: dict[str, Any]) -> None:
    """Raise ConfigError unless the feed-forward part's activation is the one that is built."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"the draft model's activation {activation!r} is not supported; expected 'silu'")
