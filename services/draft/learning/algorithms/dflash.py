"""DFLASH: a block drafter, whose layers make keys and values from several states of the target.

Published names and shapes: config.json as Qwen3's, with block_size and dflash_config; `layers.*` as Qwen3's, `fc`,
`hidden_norm`, `norm`. Embedding and head are the target's and are not stored. `token_map.json` names the tokens that
were learnt, the only ones that this project's draft service proposes; others ignore it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints import checkpoint
from outrider.checkpoints.disk import write_atomically
from outrider.errors import ConfigError
from outrider.placement.memory import SCRATCH_SLOTS
from outrider.serving.features import FeatureSpec
from services.draft.formats.decoders import plain_name, read_config
from services.draft.formats.dflash import default_layers
from services.draft.formats.target import TargetCheckpoint, read_norm, target_logits
from services.draft.formats.token_map import OWN_MAP
from services.draft.learning.algorithms.base import Algorithm, DraftShape, llama_config, target_config
from services.draft.learning.algorithms.llama_layers import RandomInit, first_layer, layer_tensors, write_folder
from services.draft.model.layers.config import Attention, Layer, Mlp, ModelConfig, attention_of
from services.draft.model.layers.heads import BlockHead
from services.draft.model.matrices.products import product
from services.draft.model.params import Params
from services.draft.model.weights.arrays import layer_params, putter
from services.draft.model.weights.dummy import open_tensors

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
        """The fusion passes the highest state nearly unchanged and scales the others to it; final norm and layers are
        the target's last ones, as far as it has such layers; the rest is random.
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
            "layers": self._target_layers(target) or [first_layer(layer, hidden, init) for layer in self.model.layers],
        }

    def _target_layers(self, target: TargetCheckpoint) -> list[Params] | None:
        """Copies of the target's last layers; None for a target with layers of another kind or shape.

        The loss starts at a fifth of what random layers have, and is lower for the first steps at least.
        """
        count = len(self.model.layers)
        try:
            theirs = read_config(target.folder).layers[-count:]
        except ConfigError:
            return None
        first = target.layers - count
        if len(theirs) < count or any(
            not _alike(own, other) for own, other in zip(self.model.layers, theirs, strict=True)
        ):
            return None
        found = []
        with open_tensors(target.folder, plain_name) as tensors:
            for i, layer in enumerate(theirs, start=first):
                params = layer_params(tensors, f"model.layers.{i}.", layer, self._hidden, putter(jnp.float32))
                found.append(params if "q_norm" in params else params | _norms_of_heads(layer, params))
        return found

    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """The fusion layer, applied to all states but the last."""
        return product(states[..., : -self._hidden], params["fc"])

    def sharpened(self, params: Params, factor: float) -> Params:
        """The final norm scales the logits, and nothing else."""
        return params | {"norm": factor * params["norm"]}

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json, model.safetensors in bfloat16, and the tokens that were learnt, each whole or not at all.

        The target's output layer of all tokens would take longer than the drafter's own layers.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / OWN_MAP, json.dumps(ids.tolist()) + "\n")
        tensors = {
            "fc.weight": params["fc"].T,
            "hidden_norm.weight": params["context_norm"],
            "norm.weight": params["norm"],
        }
        for i, (layer, own) in enumerate(zip(self.model.layers, params["layers"], strict=True)):
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer_tensors(layer, own).items()}
        write_folder(folder, self.config, tensors)


def _alike(own: Layer, theirs: Layer) -> bool:
    """True if a layer of the target has the shapes and the operations of the draft's, norms of heads apart."""
    attention = theirs.attention
    return isinstance(attention, Attention) and own == replace(theirs, attention=replace(attention, qk_norm=True))


def _norms_of_heads(layer: Layer, params: Params) -> Params:
    """Norms that leave queries and keys about as large as they are without."""
    a = layer.attention
    assert isinstance(a, Attention)
    sizes = jnp.linalg.norm(params["qkv"] * params["attention_norm"][:, None], axis=0)
    q, k, _ = jnp.split(sizes, np.cumsum([a.heads * a.head_dim, a.kv_heads * a.head_dim]))
    return {name: jnp.full(a.head_dim, jnp.sqrt(jnp.mean(own**2))) for name, own in (("q_norm", q), ("k_norm", k))}


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
