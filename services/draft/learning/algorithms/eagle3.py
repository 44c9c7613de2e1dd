"""EAGLE-3: a linear layer fuses three states of the target; the draft's vocabulary is a part of the target's.

Published names and shapes: config.json as Llama's, `midlayer.*`, `fc`, `norm`, `lm_head`, offsets `d2t`, members `t2d`.
The embedding is the target's and is not stored. Further layers are `layers.1.*` and so on, as vLLM reads them; SGLang
reads heads with one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from outrider.serving.features import FeatureSpec
from services.draft.formats.target import TargetCheckpoint, read_norm, target_logits
from services.draft.learning.algorithms.base import Algorithm, DraftShape, llama_config, target_config
from services.draft.learning.algorithms.llama_layers import RandomInit, first_layer, layer_tensors, plain, write_folder
from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of
from services.draft.model.layers.heads import Eagle3Head
from services.draft.model.matrices.products import product
from services.draft.model.params import Params

_STATES = 3
_NOISE, _HEAD_SCALE = 0.3, 0.3  # of the initial fusion; of the initial head, relative to the target's


class Eagle3(Algorithm):
    """An EAGLE-3 head of a target."""

    def __init__(self, target: TargetCheckpoint, shape: DraftShape) -> None:
        """Raises ConfigError for a shape that the target does not allow."""
        self._hidden = target.hidden_size
        self._target_vocab = target.vocab_size
        self.aux_layers = _aux_layers(target, shape.aux_layers)
        self.states = FeatureSpec(tuple(layer + 1 for layer in self.aux_layers), final=True)
        raw = target_config(target)
        inner = shape.inner or raw["intermediate_size"]
        self.config = llama_config(raw, "LlamaForCausalLMEagle3", self._hidden, inner, shape.layers or 1) | {
            "bias": False,
            "tie_word_embeddings": False,
            "vocab_size": self._target_vocab,
            "draft_vocab_size": shape.vocab,
            "target_hidden_size": self._hidden,
            "num_aux_hidden_states": _STATES,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            },
            "norm_before_residual": False,
        }
        self.model = self._model(target)

    def _model(self, target: TargetCheckpoint) -> ModelConfig:
        raw, hidden = self.config, self._hidden
        epsilon = raw["rms_norm_eps"]
        layers = tuple(
            Layer(
                attention_of(raw, width=hidden if i else 2 * hidden),
                Mlp(raw["intermediate_size"]),
                epsilon,
                beside=i == 0,
            )
            for i in range(raw["num_hidden_layers"])
        )
        return ModelConfig(
            architecture=raw["architectures"][0],
            vocab_size=raw["draft_vocab_size"],
            hidden_size=hidden,
            layers=layers,
            context=raw["max_position_embeddings"],
            head=Eagle3Head(epsilon),
            eos_token_ids=target.eos_token_ids,
        )

    def first_params(
        self, target: TargetCheckpoint, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int
    ) -> Params:
        """The fusion passes the highest state nearly unchanged and scales the others to it; norm and head are the
        target's, the head scaled down; the rest is random. The initial distributions resemble the target's.
        """
        init, hidden = RandomInit(seed), self._hidden
        head = np.asarray(target.embedding_and_head(plain, embedding=False)["head"])[:, ids]
        fusion = init.matrix(_STATES * hidden, hidden, _NOISE)
        fusion[-hidden:] += np.eye(hidden, dtype=np.float32)
        fusion /= np.repeat(scales[:_STATES], hidden)[:, None]
        return {
            "fc": jnp.asarray(fusion),
            "norm": jnp.asarray(read_norm(target)),
            "head": jnp.asarray(_HEAD_SCALE * target_logits(target)[0] * head, jnp.float32),
            "layers": [first_layer(layer, hidden, init) for layer in self.model.layers],
        }

    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """The fusion layer, applied to all states but the last."""
        return product(states[..., : -self._hidden], params["fc"])

    def head(self, params: Params) -> Any:
        """The draft's own matrix."""
        return params["head"]

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json and model.safetensors in bfloat16, each whole or not at all."""
        tensors = {"fc.weight": params["fc"].T, "norm.weight": params["norm"], "lm_head.weight": params["head"].T}
        for i, (layer, own) in enumerate(zip(self.model.layers, params["layers"], strict=True)):
            prefix = f"layers.{i}." if i else "midlayer."
            tensors |= {prefix + name: tensor for name, tensor in layer_tensors(layer, own).items()}
        members = {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(self._target_vocab), ids)}
        write_folder(folder, self.config, tensors, members)


def _aux_layers(target: TargetCheckpoint, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    layers = target.layers
    wanted = chosen or (1, layers // 2 - 1, layers - 4)
    if len(wanted) != _STATES or list(wanted) != sorted(set(wanted)) or wanted[0] < 0 or wanted[-1] >= layers:
        raise ConfigError(
            f"EAGLE-3 needs three of the target's {layers} layers, ascending, counted from 0; name them with "
            f"--aux-layers (found {' '.join(map(str, wanted))})"
        )
    return tuple(wanted)
