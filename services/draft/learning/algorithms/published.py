"""Training that continues from a published head: which of its weights are trained, and how it is published again.

A head may have every option that the service reads: biases, norms of queries and keys, norms before its fusion. All of
its own weights are trained, the fusion included, but no embedding, and no head matrix of the target. The new folder has
the same tensors under the same names.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from outrider.checkpoints.checkpoint import load_json
from outrider.checkpoints.disk import put_in_place, write_atomically
from outrider.checkpoints.eagle3 import plain_name
from outrider.errors import ConfigError
from outrider.serving.features import FeatureFormat
from services.draft.formats import eagle
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.target import TargetCheckpoint
from services.draft.learning.algorithms.base import Algorithm
from services.draft.model.fusion import Fusion, read_fusion
from services.draft.model.layers.config import Attention, Layer, Mlp
from services.draft.model.params import Params
from services.draft.model.weights.tensors import Tensors

# Parameters of the service that are the target's, or that map to the target's tokens.
_TARGETS = ("embed", "head", "ids")
_OFFSETS, _MEMBERS = "d2t", "t2d"
_WHOLE = (_OFFSETS, _MEMBERS)  # tensors of integers and truth values


class PublishedHead(Algorithm):
    """A published head. fusion: the layer that makes a feature from the target's states, where the target does not.

    mlps, attentions: feed-forward parts and attention that can be trained
    """

    fusion: Fusion | None = None
    mlps: ClassVar[tuple[type, ...]] = (Mlp,)
    attentions: ClassVar[tuple[type, ...]] = (Attention,)

    def __init__(self, folder: Path, target: TargetCheckpoint, draft: DraftCheckpoint) -> None:
        """draft: read from the folder. Raises ConfigError for a head that cannot be trained further."""
        assert draft.features is not None
        self._folder, self._draft, self._width = folder, draft, target.hidden_size
        self._vocab_size = target.vocab_size
        self.model, self.config = draft.config, load_json(folder / "config.json")
        self.states = replace(draft.features, final=True, format=FeatureFormat.BFLOAT16)
        for layer in self.model.layers:
            a = layer.attention
            plain = not isinstance(a, Attention) or (
                a.window is None and not (a.first or a.sinks or a.gated or a.softcap)
            )
            if (
                not plain
                or not isinstance(a, self.attentions)
                or not isinstance(layer.mlp, self.mlps)
                or self.model.stacked
            ):
                raise ConfigError(
                    f"{folder} has layers that are not trained: only dense layers with plain attention are, and of "
                    "MTP layers experts and latent attention"
                )

    # --- parameters ---

    def params(self) -> Params:
        """The trained parameters as they were published, float32."""
        served = self._draft.load(jnp.float32)
        return {name: value for name, value in served.items() if name not in _TARGETS}

    def first_params(
        self, target: TargetCheckpoint, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int
    ) -> Params:
        """The published parameters."""
        del target, ids, scales, seed
        return self.params()

    def embedding(self) -> Any:
        """Its own embedding, if its hidden size is not the target's."""
        return self._draft.load(jnp.float32)["embed"] if self.model.hidden_size != self._width else None

    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """The first state, unchanged."""
        del params
        return states[..., : self._width]

    def target_ids(self, served: Params) -> NDArray[np.int64]:
        """The target's id of each entry of the head. served: all parameters, as the service has them."""
        return np.asarray(served.get("ids", np.arange(self.model.vocab_size))).astype(np.int64)

    # --- the published folder ---

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json and model.safetensors, each whole or not at all. ids: empty for those of the folder."""
        arrays: dict[str, NDArray[Any]] = {}
        with Tensors(self._folder) as tensors:
            known = {self.known_as(name) for name in tensors.names}
            members: dict[str, NDArray[Any]] = {}
            if len(ids) and _OFFSETS in known:
                params, members = self._in_order(params, ids)
            learnt = self.tensors(params, known) | {name: members[name] for name in members.keys() & known}
            for name in tensors.names:
                if (found := learnt.get(self.known_as(name))) is not None:
                    array = np.asarray(found)
                    array = array if name.endswith(_WHOLE) else array.astype(ml_dtypes.bfloat16)
                else:
                    array = tensors.read(name, integers=name.endswith(_WHOLE))
                arrays[name] = np.ascontiguousarray(array)
        config = {name: value for name, value in self.config.items() if name != "quantization_config"}
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "model.safetensors.part"
        safetensors.numpy.save_file(arrays, part, {"format": "pt"})
        write_atomically(folder / "config.json", json.dumps(config, indent=1) + "\n")
        put_in_place(part, folder / "model.safetensors")

    def _in_order(
        self, params: Mapping[str, Any], ids: NDArray[np.int64]
    ) -> tuple[Mapping[str, Any], dict[str, NDArray[Any]]]:
        """Parameters whose entries are in the order of the target's ids, and the published maps of these."""
        order = np.argsort(ids)
        offsets = ids[order] - np.arange(len(ids))
        there = np.isin(np.arange(self._vocab_size), ids)
        return {**params, "head": np.asarray(params["head"])[:, order]}, {_OFFSETS: offsets, _MEMBERS: there}

    def known_as(self, name: str) -> str:
        """The key of `tensors` for the name of a published tensor."""
        return name

    @abstractmethod
    def tensors(self, params: Mapping[str, Any], stored: set[str]) -> dict[str, Any]:
        """Trained tensors by name, [out, in]. stored: names of those that the folder has."""

    def layer_tensors(self, params: Mapping[str, Any], stored: set[str]) -> dict[str, Any]:
        """The trained tensors of the layers. Arguments as of `tensors`."""
        tensors: dict[str, Any] = {}
        for i, (layer, own) in enumerate(zip(self.model.layers, params["layers"], strict=True)):
            tensors |= joined_tensors(layer, own, f"layers.{i}.")
            # Layers after the first name the norm before attention either way, and may store the other one unused.
            both = layer.beside or f"layers.{i}.hidden_norm.weight" in stored
            norms = {
                "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "mlp_norm": "post_attention_layernorm",
                "beside_norm": "input_layernorm", "attention_norm": "hidden_norm" if both else "input_layernorm",
            }  # fmt: skip
            tensors |= {f"layers.{i}.{name}.weight": own[norm] for norm, name in norms.items() if norm in own}
        return tensors


_JOINED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip


def joined_tensors(layer: Layer, own: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Published matrices and biases of a layer, which the service has joined, [out, in]. own: its parameters."""
    a = layer.attention
    sizes = [a.heads * a.head_dim, a.kv_heads * a.head_dim] if isinstance(a, Attention) else []
    ends = np.cumsum(sizes)
    tensors: dict[str, Any] = {}
    for name, parts in _JOINED.items():
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            if name + ending in own:
                pieces = np.split(np.asarray(own[name + ending]).T, ends if name == "qkv" else len(parts))
                tensors |= {f"{prefix}{part}.{kind}": piece for part, piece in zip(parts, pieces, strict=True)}
    return tensors


class PublishedEagle(PublishedHead):
    """EAGLE-1 and -2: the target's own head reads the draft's states, which imitate the target's last states."""

    state_loss_weight = 1.0

    def known_as(self, name: str) -> str:
        """As the format reader."""
        return eagle.plain_name(name)

    def tensors(self, params: Mapping[str, Any], stored: set[str]) -> dict[str, Any]:
        """As of PublishedHead."""
        own = {"fc.weight": params["fuse"].T} | self.layer_tensors(params, stored)
        return own | ({"fc.bias": params["fuse_bias"]} if "fuse_bias" in params else {})


class PublishedEagle3(PublishedHead):
    """EAGLE-3: fuses the target's states, and has its own head matrix."""

    fusion: Fusion

    def __init__(self, folder: Path, target: TargetCheckpoint, draft: DraftCheckpoint) -> None:
        """As of PublishedHead."""
        super().__init__(folder, target, draft)
        assert draft.features is not None
        with Tensors(folder, self.known_as) as tensors:
            fused, own_head = "fc.weight" in tensors, "lm_head.weight" in tensors
        if draft.features.final or not fused:
            raise ConfigError(f"training goes on from EAGLE-3 heads that fuse states; {folder} has no fc.weight")
        if not own_head:
            raise ConfigError(
                f"training goes on from EAGLE-3 heads with their own head matrix; {folder} has no lm_head.weight"
            )
        layers = draft.features.layers or (2, target.layers // 2, target.layers - 3)
        self.states = replace(self.states, layers=layers)
        self.fusion = Fusion(len(layers), len(layers) * target.hidden_size, draft.features.norm_epsilon)

    def vocabulary(self) -> NDArray[np.int64]:
        """The head's vocabulary."""
        return self.target_ids(self._draft.load(jnp.float32))

    def params(self) -> Params:
        """The trained parameters with the head matrix, and the fusion's under `fusion`."""
        with Tensors(self._folder, self.known_as) as tensors:
            fusion = read_fusion(tensors, self.fusion.states)
        served = self._draft.load(jnp.float32)
        own = {name: value for name, value in served.items() if name not in _TARGETS or name == "head"}
        return own | {"fusion": {name: jnp.asarray(array.astype(np.float32)) for name, array in fusion.items()}}

    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """The fusion of all states but the last."""
        return self.fusion(params["fusion"], states[..., : self.fusion.width])

    def head(self, params: Params) -> Any:
        """The draft's own matrix."""
        return params["head"]

    def known_as(self, name: str) -> str:
        """As the format reader."""
        return plain_name(name)

    def tensors(self, params: Mapping[str, Any], stored: set[str]) -> dict[str, Any]:
        """As of PublishedHead."""
        fusion = params["fusion"]
        names = {"fuse_bias": "fc.bias", "whole_norm": "norm_before_fc.weight"}
        names |= {f"state_norm_{i}": f"fc_norm.{i}.weight" for i in range(self.fusion.states)}
        own = {"fc.weight": fusion["fuse"].T, "norm.weight": params["norm"], "lm_head.weight": params["head"].T}
        own |= {name: fusion[param] for param, name in names.items() if param in fusion}
        return own | self.layer_tensors(params, stored)
