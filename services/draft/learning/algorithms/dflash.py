"""DFLASH: a block drafter, whose layers make keys and values from several states of the target.

Published names and shapes: config.json as Qwen3's, with block_size and dflash_config; `layers.*` as Qwen3's, `fc`,
`hidden_norm`, `norm`. Embedding and head are the target's and are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError
from outrider.placement.memory import SCRATCH_SLOTS
from outrider.serving.features import FeatureSpec
from services.draft.formats.dflash import default_layers
from services.draft.formats.target import TargetCheckpoint, read_norm, target_logits
from services.draft.learning.algorithms.base import Algorithm, DraftShape, llama_config, target_config
from services.draft.learning.algorithms.llama_layers import RandomInit, first_layer, layer_tensors, write_folder
from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of
from services.draft.model.layers.heads import BlockHead
from services.draft.model.matrices.products import product
from services.draft.model.params import Params

_LAYERS = 3
_MAX_STATES = 5
_NOISE = 0.3  # of the initial fusion


class Dflash(Algorithm):
    """A block drafter of a target."""

    row_share = 0.25  # a row computes a whole block

    def __init__(self, target: TargetCheckpoint, shape: DraftShape) -> None:
        """Raises ConfigError for a shape that the target does not allow."""
        if not 2 <= shape.block <= SCRATCH_SLOTS:
            raise ConfigError(f"--block-size must lie between 2 and {SCRATCH_SLOTS}, not {shape.block}")
        self._hidden = target.hidden_size
        self.aux_layers = _aux_layers(target, shape.aux_layers)
        self.states = FeatureSpec(tuple(layer + 1 for layer in self.aux_layers), final=True)
        raw = target_config(target)
        count = shape.layers or _LAYERS
        factor, softcap = target_logits(target)
        mask = _mask_token(target)
        own: dict[str, Any] = {"mask_token_id": mask, "target_layer_ids": list(self.aux_layers)}
        own |= {"output_multiplier": factor} if factor != 1 else {}
        own |= {} if softcap is None else {"final_logit_softcapping": softcap}
        config = llama_config(raw, "DFlashDraftModel", self._hidden, shape.inner or raw["intermediate_size"], count)
        del config["mlp_bias"]
        self.config = config | {
            "model_type": "qwen3",
            "vocab_size": target.vocab_size,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * count,
            "num_target_layers": target.layers,
            "block_size": shape.block,
            "dflash_config": own,
        }
        epsilon = self.config["rms_norm_eps"]
        layer = Layer(attention_of(self.config, qk_norm=True), Mlp(self.config["intermediate_size"]), epsilon)
        self.model = ModelConfig(
            architecture="DFlashDraftModel",
            vocab_size=target.vocab_size,
            hidden_size=self._hidden,
            layers=(layer,) * count,
            context=self.config["max_position_embeddings"],
            head=BlockHead(epsilon, shape.block, mask, (False,) * count),
            eos_token_ids=target.eos_token_ids,
            softcap=softcap,
            factor=factor,
        )

    def first_params(
        self, target: TargetCheckpoint, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int
    ) -> Params:
        """The fusion passes the highest state nearly unchanged and scales the others to it; the final norm is the
        target's; the rest is random.
        """
        del ids
        init, hidden, states = RandomInit(seed), self._hidden, len(self.aux_layers)
        fusion = init.matrix(states * hidden, hidden, _NOISE)
        fusion[-hidden:] += np.eye(hidden, dtype=np.float32)
        fusion /= np.repeat(scales[:states], hidden)[:, None]
        return {
            "fc": jnp.asarray(fusion),
            "context_norm": jnp.ones(hidden, jnp.float32),
            "norm": jnp.asarray(read_norm(target)),
            "layers": [first_layer(layer, hidden, init) for layer in self.model.layers],
        }

    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """The fusion layer, applied to all states but the last."""
        return product(states[..., : -self._hidden], params["fc"])

    def sharpened(self, params: Params, factor: float) -> Params:
        """The final norm scales the logits, and nothing else."""
        return params | {"norm": factor * params["norm"]}

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json and model.safetensors in bfloat16, each whole or not at all."""
        del ids
        tensors = {
            "fc.weight": params["fc"].T,
            "hidden_norm.weight": params["context_norm"],
            "norm.weight": params["norm"],
        }
        for i, (layer, own) in enumerate(zip(self.model.layers, params["layers"], strict=True)):
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer_tensors(layer, own).items()}
        write_folder(folder, self.config, tensors)


def _aux_layers(target: TargetCheckpoint, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    layers = target.layers
    wanted = chosen or default_layers(layers, max(1, min(_MAX_STATES, layers - 3)))
    if list(wanted) != sorted(set(wanted)) or wanted[0] < 0 or wanted[-1] >= layers:
        raise ConfigError(
            f"DFLASH needs some of the target's {layers} layers, ascending, counted from 0; name them with "
            f"--aux-layers (found {' '.join(map(str, wanted))})"
        )
    return tuple(wanted)


def _mask_token(target: TargetCheckpoint) -> int:
    """The first row of the embedding that no token has; without one, the last and rarest token."""
    known = max(checkpoint.vocabulary(target.folder).values(), default=-1) + 1
    return known if 0 < known < target.vocab_size else target.vocab_size - 1
