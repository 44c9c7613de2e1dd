"""Published heads that learn on: what is learnt of them, and how they are published again.

A head may have all that the service reads: biases, norms of queries and keys, norms before its fusion. It learns all of
its own weights, the fusion included, but no embedding. Published again, a folder has the tensors that it had, under the
same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from outrider.checkpoint import load_json
from outrider.errors import ConfigError
from outrider.serving.features import FeatureFormat
from services.draft.model.config import Attention, Mlp
from services.draft.model.formats.base import Draft
from services.draft.model.formats.eagle3 import plain_name
from services.draft.model.formats.target import Target
from services.draft.model.fusion import Fusion, read_fusion
from services.draft.model.heads import Params
from services.draft.model.tensors import Tensors
from services.draft.train.algorithms.base import Algorithm

LEARNT = ("norm", "head", "layers")
"""What of the parameters that the service runs is learnt. The fusion is learnt as well, and stands beside them."""


class ServedHead(Algorithm):
    """An EAGLE-3 head that is served already. fusion: what makes a feature of the target's states."""

    def __init__(self, folder: Path, target: Target, draft: Draft) -> None:
        """draft: what was read from the folder. Raises ConfigError for a head that cannot learn on."""
        self._folder, self._draft = folder, draft
        assert draft.features is not None
        self._check()
        layers = draft.features.layers or (2, target.layers // 2, target.layers - 3)
        self.states = replace(draft.features, layers=layers, final=True, format=FeatureFormat.BFLOAT16)
        self.model, self.config = draft.config, load_json(folder / "config.json")
        self.fusion = Fusion(len(layers), len(layers) * target.hidden_size, draft.features.norm_epsilon)

    def _check(self) -> None:
        assert self._draft.features is not None
        with Tensors(self._folder, plain_name) as tensors:
            fused, own_head = "fc.weight" in tensors, "lm_head.weight" in tensors
        if self._draft.features.final or not fused:
            raise ConfigError(f"--online teaches heads that fuse the target's states; {self._folder} has no fc.weight")
        if not own_head:
            raise ConfigError(f"--online teaches heads with a head of their own; {self._folder} has no lm_head.weight")
        for layer in self._draft.config.layers:
            a = layer.attention
            if not isinstance(a, Attention) or a.window is not None or a.sinks or a.gated:
                raise ConfigError(f"--online teaches heads with plain attention alone; that of {self._folder} is not")

    # --- parameters ---

    def params(self) -> Params:
        """What is learnt, float32, as it was published."""
        served = self._draft.load(jnp.float32)
        with Tensors(self._folder, plain_name) as tensors:
            fusion = read_fusion(tensors, self.fusion.states)
        fusion = {name: jnp.asarray(array.astype(np.float32)) for name, array in fusion.items()}
        return {"fusion": fusion} | {name: served[name] for name in LEARNT}

    def first_params(self, target: Target, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int) -> Params:
        """Those that were published."""
        del target, ids, scales, seed
        return self.params()

    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """The fusion of the first states; the last one is not among them."""
        return self.fusion(params["fusion"], states[..., : self.fusion.width])

    def head(self, params: Params) -> Any:
        """Its own."""
        return params["head"]

    def target_ids(self, served: Params) -> NDArray[np.int64]:
        """The target's id of each entry of the head."""
        return np.asarray(served["ids"] if "ids" in served else np.arange(self.model.vocab_size)).astype(np.int64)

    # --- the published folder ---

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json and model.safetensors, each in one piece or not at all."""
        del ids
        learnt = self._tensors(params)
        arrays: dict[str, NDArray[Any]] = {}
        with Tensors(self._folder) as tensors:
            for name in tensors.names:
                if (found := learnt.get(plain_name(name))) is not None:
                    arrays[name] = np.ascontiguousarray(np.asarray(found).astype(ml_dtypes.bfloat16))
                else:
                    arrays[name] = np.ascontiguousarray(_read(tensors, name))
        config = {name: value for name, value in self.config.items() if name != "quantization_config"}
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "model.safetensors.part"
        safetensors.numpy.save_file(arrays, part, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        part.replace(folder / "model.safetensors")

    def _tensors(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Learnt tensors by the reader's names, [out, in]."""
        fusion = params["fusion"]
        tensors = {"fc.weight": fusion["fuse"].T, "norm.weight": params["norm"], "lm_head.weight": params["head"].T}
        if "fuse_bias" in fusion:
            tensors["fc.bias"] = fusion["fuse_bias"]
        if "whole_norm" in fusion:
            tensors["norm_before_fc.weight"] = fusion["whole_norm"]
        for i in range(self.fusion.states):
            if f"state_norm_{i}" in fusion:
                tensors[f"fc_norm.{i}.weight"] = fusion[f"state_norm_{i}"]
        for i, layer in enumerate(params["layers"]):
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in self._layer_tensors(i, layer).items()}
        return tensors

    def _layer_tensors(self, index: int, params: Mapping[str, Any]) -> dict[str, Any]:
        layer = self.model.layers[index]
        a = layer.attention
        assert isinstance(a, Attention)
        assert isinstance(layer.mlp, Mlp)
        ends = np.cumsum([a.heads * a.head_dim, a.kv_heads * a.head_dim])
        tensors: dict[str, Any] = {}
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            for name, parts in _JOINED.items():
                if name + ending in params:
                    whole = np.asarray(params[name + ending]).T
                    pieces = np.split(whole, ends if name == "qkv" else len(parts))
                    tensors |= {f"{part}.{kind}": piece for part, piece in zip(parts, pieces, strict=True)}
        tensors |= {f"self_attn.{name}.weight": params[name] for name in ("q_norm", "k_norm") if name in params}
        tensors["post_attention_layernorm.weight"] = params["mlp_norm"]
        if layer.beside:
            tensors["input_layernorm.weight"] = params["beside_norm"]
        # Further layers call the norm before attention by either name, and may have the other one without using it.
        with Tensors(self._folder, plain_name) as stored:
            both = layer.beside or f"layers.{index}.hidden_norm.weight" in stored
        tensors["hidden_norm.weight" if both else "input_layernorm.weight"] = params["attention_norm"]
        return tensors


_JOINED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip


def _read(tensors: Tensors, name: str) -> NDArray[Any]:
    return tensors.read(name, integers=re.search(r"(d2t|t2d)$", name) is not None)
