"""MTP: one decoder layer behind a fusion of [norm(feature); norm(embedding)], with a final norm of its own.

Published in the layout of MiMo-7B (`model.mtp_layers.0.*`), the layout for dense models: a Qwen2 layer, whose queries,
keys and values have biases; its embedding at position 0 counts as zeros. Embedding and head are the target's.
config.json names Qwen2, too: Hugging Face's classes know MiMo only through its remote code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from services.draft.formats.target import TargetCheckpoint, read_norm, target_logits
from services.draft.learning.algorithms.base import DraftShape, LastStateHead, llama_config, target_config
from services.draft.learning.algorithms.llama_layers import RandomInit, first_layer, layer_tensors, write_folder
from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of
from services.draft.model.layers.heads import MtpHead
from services.draft.model.params import Params

_PREFIX = "model.mtp_layers.0."


class Mtp(LastStateHead):
    """An MTP layer of a target."""

    def __init__(self, target: TargetCheckpoint, shape: DraftShape) -> None:
        """Raises ConfigError for more than one layer."""
        if (shape.layers or 1) != 1:
            raise ConfigError("an MTP draft has a single layer; leave out --num-layers")
        raw, self._hidden = target_config(target), target.hidden_size
        inner = shape.inner or raw["intermediate_size"]
        self.config = llama_config(raw, "MiMoMTP", self._hidden, inner, 1) | {
            "model_type": "qwen2", "attention_bias": True, "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False, "vocab_size": target.vocab_size,
        }  # fmt: skip
        epsilon = self.config["rms_norm_eps"]
        self.model = ModelConfig(
            architecture="MiMoMTP",
            vocab_size=target.vocab_size,
            hidden_size=self._hidden,
            layers=(Layer(attention_of(self.config, qkv_bias=True), Mlp(inner), epsilon),),
            context=self.config["max_position_embeddings"],
            head=MtpHead(epsilon, zero_first_embedding=True),
            eos_token_ids=target.eos_token_ids,
        )

    def first_params(
        self, target: TargetCheckpoint, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int
    ) -> Params:
        """The fusion passes the feature unchanged and adds a random part of the embedding; the final norm is the
        target's, scaled so that products with the target's head are its logits.
        """
        del ids, scales
        init, hidden = RandomInit(seed), self._hidden
        return {
            "fuse": jnp.asarray(np.concatenate([init.matrix(hidden, hidden), np.eye(hidden)]), jnp.float32),
            "embedding_norm": jnp.ones(hidden, jnp.float32),
            "feature_norm": jnp.ones(hidden, jnp.float32),
            "norm": jnp.asarray(target_logits(target)[0] * read_norm(target)),
            "layers": [first_layer(layer, hidden, init) for layer in self.model.layers],
        }

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json and model.safetensors in bfloat16, each whole or not at all."""
        del ids
        embedding, feature = np.split(np.asarray(params["fuse"]), 2)
        tensors = {
            "input_proj.weight": np.concatenate([feature, embedding]).T,
            "token_layernorm.weight": params["embedding_norm"],
            "hidden_layernorm.weight": params["feature_norm"],
            "final_layernorm.weight": params["norm"],
        } | layer_tensors(self.model.layers[0], params["layers"][0])
        write_folder(folder, self.config, {_PREFIX + name: tensor for name, tensor in tensors.items()})
