"""EAGLE-1 and -2: Llama layers behind `fc`, which fuses the embedding and the target's last state.

The output predicts that state, and the target's own head reads it. EAGLE's loss includes the distance to it (smooth L1,
Li et al.). Published names: `fc`, `layers.*`; layer 0 has no input norm, and there is no final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from services.draft.formats.target import TargetCheckpoint, target_logits
from services.draft.learning.algorithms.base import DraftShape, LastStateHead, llama_config, target_config
from services.draft.learning.algorithms.llama_layers import RandomInit, first_layer, layer_tensors, plain, write_folder
from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of
from services.draft.model.layers.heads import EagleHead
from services.draft.model.params import Params


class Eagle(LastStateHead):
    """An EAGLE head of a target."""

    state_loss_weight = 1.0

    def __init__(self, target: TargetCheckpoint, shape: DraftShape) -> None:
        raw, self._hidden = target_config(target), target.hidden_size
        inner = shape.inner or raw["intermediate_size"]
        self.config = llama_config(raw, "LlamaForCausalLMEagle", self._hidden, inner, shape.layers or 1) | {
            "bias": True, "tie_word_embeddings": False, "vocab_size": target.vocab_size,
        }  # fmt: skip
        epsilon = self.config["rms_norm_eps"]
        factor, softcap = target_logits(target)
        self.model = ModelConfig(
            architecture=self.config["architectures"][0],
            vocab_size=target.vocab_size,
            hidden_size=self._hidden,
            layers=tuple(
                Layer(attention_of(self.config), Mlp(inner), epsilon, input_norm=i > 0)
                for i in range(shape.layers or 1)
            ),
            context=self.config["max_position_embeddings"],
            head=EagleHead(epsilon),
            eos_token_ids=target.eos_token_ids,
            softcap=softcap,
            factor=factor,
        )

    def first_params(
        self, target: TargetCheckpoint, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int
    ) -> Params:
        """The fusion passes the target's state unchanged and scales the embedding to it; the rest is random."""
        del ids
        init, hidden = RandomInit(seed), self._hidden
        tensors = target.embedding_and_head(plain)
        size = float(np.sqrt(np.mean(np.square(np.asarray(tensors.get("embed", tensors["head"]))))))
        fuse = np.concatenate([init.matrix(hidden, hidden, float(scales[-1]) / size), np.eye(hidden)])
        return {
            "fuse": jnp.asarray(fuse, jnp.float32),
            "fuse_bias": jnp.zeros(hidden, jnp.float32),
            "layers": [first_layer(layer, hidden, init) for layer in self.model.layers],
        }

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json and model.safetensors in bfloat16, each whole or not at all."""
        del ids
        tensors = {"fc.weight": params["fuse"].T, "fc.bias": params["fuse_bias"]}
        for i, (layer, own) in enumerate(zip(self.model.layers, params["layers"], strict=True)):
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer_tensors(layer, own).items()}
        write_folder(folder, self.config, tensors)
