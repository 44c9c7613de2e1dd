"""What every algorithm says of the draft that it trains.

The unrolling, the loss, the optimizer and the evaluation know no algorithm: they see a model as the draft service runs
it (`ModelConfig`), parameters as the service has them, and the feature that the target's states make.
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
from services.draft.formats.target import Target
from services.draft.model.layers.config import ModelConfig
from services.draft.model.layers.heads import Params


@dataclass(frozen=True)
class Shape:
    """What may be chosen of a draft. layers: of the decoder, None for the usual number; hidden: its width, where it is
    not the target's; inner: width of its feed-forward part, None for the usual one; vocab: tokens that it learns to
    propose; aux_layers: of the target, None for the usual ones.
    """

    layers: int | None = None
    hidden: int | None = None
    inner: int | None = None
    vocab: int = 8192
    aux_layers: tuple[int, ...] | None = None


class Algorithm(ABC):
    """One draft for one target.

    states: what is collected; the target's last state, behind its final norm, stands last
    model:  as the draft service runs it
    config: the published config.json
    imitation: weight of the distance between the draft's states and the target's last ones in what is to become small
    whole_vocabulary: all tokens are learnt, whatever the shape says
    """

    states: FeatureSpec
    model: ModelConfig
    config: dict[str, Any]
    imitation: float = 0.0
    whole_vocabulary: bool = False

    @abstractmethod
    def first_params(self, target: Target, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int) -> Params:
        """Parameters to begin with, float32.

        ids: tokens that the draft learns to propose; scales: root mean square of each collected state
        """

    def vocabulary(self) -> NDArray[np.int64] | None:
        """The target's ids of the tokens that it proposes, if they are settled already."""
        return None

    def embedding(self) -> Any:
        """Its embedding, [V, H], if that is neither learnt nor the target's; None if it is."""
        return None

    def feature(self, params: Params, states: jax.Array) -> jax.Array | None:
        """What the first layer is fed with, [..., H], of the collected states, [..., n * Ht]; None if it is not fed."""
        del params, states
        return None

    def head(self, params: Params) -> Any:
        """The matrix of the logits, [H, V'], if it is learnt; None if it is the target's."""
        del params
        return None

    def sharpened(self, params: Params, factor: float) -> Params | None:
        """Parameters whose logits are larger by a factor and whose states are the same; None without an own matrix."""
        return params | {"head": factor * params["head"]} if "head" in params else None

    @abstractmethod
    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write a folder in the published format. params: NumPy arrays or JAX's."""


class LastStateHead(Algorithm):
    """A head that is fed with the target's last state as it is."""

    states = FeatureSpec(final=True)

    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """That state."""
        del params
        return states


def target_config(target: Target) -> dict[str, Any]:
    """config.json of a target's language model."""
    raw = load_json(target.folder / "config.json")
    inner: dict[str, Any] = raw.get("text_config") or raw
    return inner


def llama_config(raw: Mapping[str, Any], architecture: str, hidden: int, inner: int, layers: int) -> dict[str, Any]:
    """The part of a published config.json that drafts in Llama's manner share. raw: the target's.

    A draft of the target's own width has heads like the target's.
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


_CONTEXT = 8192  # tokens that a draft claims to follow, if the target does
