"""The interface of training algorithms.

Unrolling, loss, optimizer and evaluation depend on no algorithm: they see a model as the draft service runs it
(`ModelConfig`), parameters as the service has them, and the feature made from the target's states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.checkpoint import load_json
from outrider.serving.features import FeatureSpec
from services.draft.formats.target import TargetCheckpoint
from services.draft.model.layers.config import ModelConfig
from services.draft.model.layers.heads import BlockHead
from services.draft.model.params import Params


@dataclass(frozen=True)
class DraftShape:
    """Size options of a draft model.

    layers:     of the decoder; None for the algorithm's default
    hidden:     hidden size, for algorithms that do not take the target's; None for the default
    inner:      width of the feed-forward part; None for the default
    vocab:      tokens that the draft proposes
    aux_layers: layers of the target whose states are features; None for the default ones
    block:      positions of a block, the root included
    """

    layers: int | None = None
    hidden: int | None = None
    inner: int | None = None
    vocab: int = 8192
    aux_layers: tuple[int, ...] | None = None
    block: int = 8


class Algorithm(ABC):
    """One draft model for one target.

    states: the collected hidden states; the target's last state, behind its final norm, stands last
    model:  as the draft service runs it
    config: the published config.json
    state_loss_weight: weight in the loss of the distance between the draft's states and the target's last states
    whole_vocabulary: the draft proposes all tokens, regardless of the size options
    row_share: fraction of the rows of a pack that are trained; packs hold them in random order
    """

    states: FeatureSpec
    model: ModelConfig
    config: dict[str, Any]
    state_loss_weight: float = 0.0
    whole_vocabulary: bool = False
    row_share: float = 1.0

    @property
    def depth(self) -> int | None:
        """Tokens that a row predicts, where the shape of the draft says it."""
        head = self.model.head
        if isinstance(head, BlockHead):
            return head.size - 1
        return None if head.uses_features else 1

    @abstractmethod
    def first_params(
        self, target: TargetCheckpoint, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int
    ) -> Params:
        """Initial parameters, float32.

        ids: tokens that the draft proposes; scales: root mean square of each collected state
        """

    def vocabulary(self) -> NDArray[np.int64] | None:
        """The target's ids of the draft's tokens, if they are fixed already."""
        return None

    def embedding(self) -> Any:
        """Its embedding, [V, H], if it is neither trained nor the target's; None otherwise."""
        return None

    def feature(self, params: Params, states: jax.Array) -> jax.Array | None:
        """The first layer's feature, [..., H], from the collected states, [..., n * Ht]; None without features."""
        del params, states
        return None

    def head(self, params: Params) -> Any:
        """The matrix of the logits, [H, V'], if it is trained; None if it is the target's."""
        del params
        return None

    def sharpened(self, params: Params, factor: float) -> Params | None:
        """Parameters whose logits are scaled by a factor and whose states are unchanged; None without an own matrix."""
        return params | {"head": factor * params["head"]} if "head" in params else None

    @abstractmethod
    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write a folder in the published format. params: arrays of NumPy or JAX."""


class LastStateHead(Algorithm):
    """A head whose feature is the target's last state, unchanged."""

    states = FeatureSpec(final=True)

    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """The last state."""
        del params
        return states


def target_config(target: TargetCheckpoint) -> dict[str, Any]:
    """config.json of a target's language model."""
    raw = load_json(target.folder / "config.json")
    inner: dict[str, Any] = raw.get("text_config") or raw
    return inner


def llama_config(raw: Mapping[str, Any], architecture: str, hidden: int, inner: int, layers: int) -> dict[str, Any]:
    """The keys of a published config.json that Llama-like drafts share. raw: the target's.

    A draft with the target's hidden size has as many heads.
    """
    rope = dict(raw.get("rope_parameters") or {})
    heads = raw["num_attention_heads"]
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        "max_position_embeddings": min(int(raw.get("max_position_embeddings", _CONTEXT)), _CONTEXT),
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }


_CONTEXT = 8192  # largest context length of a published draft, in tokens
