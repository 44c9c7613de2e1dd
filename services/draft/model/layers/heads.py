"""Heads: how the input of a model's first layer is made, and how the last layer's output becomes states and logits.

A head is a frozen description; its parameters stand beside the layers' in `Params`. Feature-based heads read the
target's hidden states: row j pairs token j + 1 with the feature of token j, and passes on a state that replaces the
feature of token j + 1 until the target's own arrives.

Legend of shapes: S sessions, Q rows a session, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.model.matrices.products import product
from services.draft.model.params import Params


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """x / rms(x) * weight, the quotient computed in float32. x: [..., H]."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype) * weight


class Inputs(NamedTuple):
    """The inputs of a head. embedding: [S, Q, H], of the rows' tokens; positions: [S, Q].

    feature: [S, Q, H], the target's or the draft's own; None for heads without features
    """

    embedding: jax.Array
    positions: jax.Array
    feature: jax.Array | None = None


@dataclass(frozen=True)
class Head(ABC):
    """A head. epsilon: of its RMS norms.

    uses_features: it reads the target's hidden states. keeps_states: its rows keep the states that they pass on
    """

    epsilon: float

    uses_features: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False

    @abstractmethod
    def join(self, params: Params, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
        """The first layer's input [S, Q, H], and the second input of layers with `beside`."""

    @abstractmethod
    def finish(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """From the last layer's output: the state for the logits, and the state that is passed on, or None."""


@dataclass(frozen=True)
class TokenHead(Head):
    """A language model's own head: embeddings are the input, the final norm stands before the logits.

    scale: of embeddings
    """

    scale: float = 1.0

    def join(self, params: Params, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
        """The scaled embedding."""
        del params
        embedding = inputs.embedding
        return embedding if self.scale == 1 else embedding * jnp.asarray(self.scale, embedding.dtype), None

    def finish(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The final norm."""
        return rms_norm(x, params["norm"], self.epsilon), None


@dataclass(frozen=True)
class EagleHead(Head):
    """EAGLE-1 and -2: a linear layer fuses [embedding; feature]; the output predicts the target's normed state."""

    uses_features = True
    keeps_states = True

    def join(self, params: Params, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
        """params: fuse [2H, H] and optionally fuse_bias [H]."""
        assert inputs.feature is not None
        x = product(jnp.concatenate([inputs.embedding, inputs.feature], axis=-1), params["fuse"])
        return (x + params["fuse_bias"] if "fuse_bias" in params else x), None

    def finish(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Logits and the next row use the same state."""
        del params
        return x, x


@dataclass(frozen=True)
class Eagle3Head(Head):
    """EAGLE-3: the feature, already fused by the target, is the residual stream; the embedding is the second input.

    norm_output: the state that is passed on is the normed one (EAGLE-3.1)
    """

    norm_output: bool = False

    uses_features = True
    keeps_states = True

    def join(self, params: Params, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
        """The feature, and the embedding as the second input."""
        del params
        assert inputs.feature is not None
        return inputs.feature, inputs.embedding

    def finish(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The head's own final norm."""
        normed = rms_norm(x, params["norm"], self.epsilon)
        return normed, normed if self.norm_output else x


@dataclass(frozen=True)
class ParallelHead(Eagle3Head):
    """P-EAGLE: EAGLE-3, and rows of masks that predict the tokens behind the root's child in one pass (parallel.py).

    Masks have a feature of their own, params `mask` [H], already fused.

    size:       tokens that a pass predicts, and the root
    mask_token: whose embedding masks have
    """

    size: int = 2
    mask_token: int = 0


@dataclass(frozen=True)
class MtpHead(Head):
    """Multi-token prediction: a linear layer fuses [norm(embedding); norm(feature)] for a decoder layer of the model.

    passes_normed:        the state that is passed on is the normed one
    zero_first_embedding:  the embedding at position 0 counts as zeros (MiMo)
    """

    passes_normed: bool = True
    zero_first_embedding: bool = False

    uses_features = True
    keeps_states = True

    def join(self, params: Params, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
        """params: embedding_norm, feature_norm [H], and fuse [2H, H]."""
        assert inputs.feature is not None
        embedding = inputs.embedding
        if self.zero_first_embedding:
            embedding = jnp.where(inputs.positions[..., None] == 0, 0, embedding)
        token = rms_norm(embedding, params["embedding_norm"], self.epsilon)
        feature = rms_norm(inputs.feature, params["feature_norm"], self.epsilon)
        return product(jnp.concatenate([token, feature], axis=-1), params["fuse"]), None

    def finish(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The layer's own final norm; its output is read by the target's head."""
        normed = rms_norm(x, params["norm"], self.epsilon)
        return normed, normed if self.passes_normed else x


@dataclass(frozen=True)
class BlockHead(Head):
    """A block drafter (DFlash): the target's features are context alone, and a block of masks is the input (block.py).

    size:       positions of a block, the root included
    mask_token: whose embedding stands at the positions to predict
    causal:     by layer, whether a position attends only to those before it
    scale:      of embeddings
    selector:   candidates of a position whose scores depend on the token before it; 0 without (programs/block.py)
    group:      channels that share the changing part of a kernel, in layers with convolutions; 0 without (block.py)
    """

    size: int
    mask_token: int
    causal: tuple[bool, ...]
    scale: float = 1.0
    selector: int = 0
    group: int = 0

    uses_features = True

    def join(self, params: Params, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
        """The scaled embedding."""
        del params
        embedding = inputs.embedding
        return embedding if self.scale == 1 else embedding * jnp.asarray(self.scale, embedding.dtype), None

    def context(self, params: Params, feature: jax.Array) -> jax.Array:
        """What every layer's keys and values of a feature are made from. feature: [..., H], already fused."""
        return rms_norm(feature, params["context_norm"], self.epsilon)

    def finish(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The final norm."""
        return rms_norm(x, params["norm"], self.epsilon), None
