"""EAGLE-3 heads, as SpecForge and lmsys, AngelSlim and speculators publish them.

`fc` and its norms fuse the target's states; the target gets them and applies them. The first layer's attention reads
[norm(embedding); norm(feature)]. The head has a small vocabulary of its own; `d2t` holds for each of its entries the
offset to the target's id.

P-EAGLE heads have `mask_hidden` as well, states in place of the target's at positions to predict in the same pass, and
an embedding of their own. config.json names the token there (pard_token, ptd_token_id or mask_token_id), and that of
speculators the number of tokens that a pass predicts.

Keys of config.json and names of tensors: outrider/checkpoints/eagle3.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from outrider.checkpoints.config_json import load_config, values_of
from outrider.checkpoints.eagle3 import DEFAULT_STATES, flat, is_speculators, layer_ids, plain_name, target_ids
from outrider.config import LoadFormat
from outrider.errors import ConfigError
from outrider.placement.memory import SCRATCH_SLOTS
from outrider.serving.features import FeatureSpec
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.target import TargetCheckpoint, check_fit
from services.draft.model.fusion import Fusion, read_fusion
from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of, check_activation
from services.draft.model.layers.heads import Eagle3Head, ParallelHead
from services.draft.model.params import Params
from services.draft.model.weights.arrays import layer_params, layer_shapes, putter
from services.draft.model.weights.dummy import open_tensors
from services.draft.model.weights.tensors import Tensors

_WHAT = "an EAGLE-3 head"
_EMBED, _NORM, _HEAD, _OFFSETS, _MEMBERS = "embed_tokens.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"
_MASK, _MASK_TOKENS = "mask_hidden", ("pard_token", "ptd_token_id", "mask_token_id")
_PARALLEL_TOKENS = 8  # that a pass of a P-EAGLE head predicts, where config.json has no number
_NOT_READ = (_EMBED, _MEMBERS, _OFFSETS, "verifier_norm.weight", "verifier_lm_head.weight")
_Shapes = dict[str, tuple[int, ...]]


def read_eagle3(folder: Path, target: TargetCheckpoint, load_format: LoadFormat = "auto") -> DraftCheckpoint:
    """An EAGLE-3 head. Raises ConfigError with the part that does not fit."""
    raw = load_config(folder)
    with open_tensors(folder, plain_name, load_format) as tensors, values_of(folder / "config.json"):
        reader = _Reader(folder, flat(raw), tensors, target, load_format, speculators=is_speculators(raw))
        return reader.draft()


@dataclass
class _Reader:
    """Reads one head. raw: its flattened configuration. speculators: True for that library's format."""

    folder: Path
    raw: dict[str, Any]
    tensors: Tensors
    target: TargetCheckpoint
    load_format: LoadFormat
    speculators: bool

    def draft(self) -> DraftCheckpoint:
        """Raises ConfigError for a part that does not fit, KeyError for a key that config.json lacks."""
        check_activation(self.raw)
        hidden = self.raw["hidden_size"]
        width = self.raw.get("target_hidden_size") or hidden
        check_fit(self.folder, self.target, vocab_size=self.raw["vocab_size"], hidden_size=width)
        config = self._config(hidden)
        shapes = self._shapes(config) | self._fusion_shapes(hidden)
        self.tensors.check(_WHAT, shapes, [*_NOT_READ, *self._spare_norms(config)])
        ids = self._target_ids(config.vocab_size)

        def load(dtype: Any) -> Params:
            with open_tensors(self.folder, plain_name, self.load_format) as tensors:
                return self._load(tensors, config, shapes, ids, dtype)

        embedding, head = _EMBED not in shapes, _HEAD not in shapes
        shared = self.target.shared(embedding=embedding, head=head) if embedding or head else {}
        return DraftCheckpoint(config, load, self._features(), self._fusion(hidden), shared)

    # --- configuration ---

    def _config(self, hidden: int) -> ModelConfig:
        raw, epsilon = self.raw, self.raw.get("rms_norm_eps", 1e-6)
        bias = bool(raw.get("attention_bias", False))
        qk_norm = "layers.0.self_attn.q_norm.weight" in self.tensors
        layers = tuple(
            Layer(
                attention_of(raw, width=hidden if i else 2 * hidden, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm),
                Mlp(raw["intermediate_size"], bool(raw.get("mlp_bias", False))),
                epsilon,
                beside=i == 0,
                residual_after_norm=i == 0 and bool(raw.get("norm_before_residual", self.speculators)),
            )
            for i in range(raw["num_hidden_layers"])
        )
        return ModelConfig(
            architecture=(raw.get("architectures") or ["EAGLE3"])[0],
            vocab_size=raw.get("draft_vocab_size") or self.target.vocab_size,
            hidden_size=hidden,
            layers=layers,
            context=int(raw.get("max_position_embeddings", 2048)),
            head=self._head(epsilon),
            eos_token_ids=self.target.eos_token_ids,
        )

    def _head(self, epsilon: float) -> Eagle3Head:
        raw = self.raw
        normed = bool(raw.get("norm_output", False))
        if _MASK not in self.tensors:
            return Eagle3Head(epsilon, normed)
        token = next((int(raw[key]) for key in _MASK_TOKENS if key in raw), -1)
        if not 0 <= token < self.target.vocab_size:
            raise ConfigError(
                f"{self.folder / 'config.json'} of a P-EAGLE head must name its mask token among the "
                f"{self.target.vocab_size} of the target, in one of {', '.join(_MASK_TOKENS)}"
            )
        methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
        count = int(methods[0].get("speculative_tokens") or raw.get("para_num") or _PARALLEL_TOKENS)
        return ParallelHead(epsilon, normed, min(count, SCRATCH_SLOTS) + 1, token)

    @property
    def _aux(self) -> bool:
        return bool(self.raw.get("use_aux_hidden_state", True))

    def _layer_ids(self) -> tuple[int, ...]:
        return layer_ids(self.raw, speculators=self.speculators)

    def _states(self) -> int:
        """Number of target states that the fusion concatenates."""
        if not self._aux:
            return 1
        ids = self._layer_ids()
        declared = self.raw.get("num_aux_hidden_states")
        if ids and declared and declared != len(ids):
            raise ConfigError(
                f"{self.folder / 'config.json'} names {len(ids)} layers, but num_aux_hidden_states is {declared}"
            )
        return len(ids) or declared or DEFAULT_STATES

    def _features(self) -> FeatureSpec:
        epsilon = self.raw.get("rms_norm_eps", 1e-6)
        if not self._aux:
            return FeatureSpec(final=True, norm_epsilon=epsilon)
        if not self._layer_ids() and self._states() != DEFAULT_STATES:
            raise ConfigError(
                f"{self.folder / 'config.json'} needs {self._states()} states of the target, but does not name their "
                "layers in eagle_aux_hidden_state_layer_ids"
            )
        return FeatureSpec(self._layer_ids(), norm_epsilon=epsilon)

    # --- tensors ---

    def _shapes(self, config: ModelConfig) -> _Shapes:
        hidden = config.hidden_size
        shapes: _Shapes = {_NORM: (hidden,)}
        if self._own_head:
            shapes[_HEAD] = (config.vocab_size, hidden)
        if _MASK in self.tensors:
            shapes[_MASK] = self.tensors.shape(_MASK)
            self._check_mask(shapes[_MASK])
        if hidden != self.target.hidden_size or (_MASK in shapes and _EMBED in self.tensors):
            shapes[_EMBED] = (self.target.vocab_size, hidden)
        for i, layer in enumerate(config.layers):
            own = layer_shapes(layer, hidden, self._input_norm(i))
            shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
        return shapes

    def _check_mask(self, shape: tuple[int, ...]) -> None:
        width = self._states() * self.target.hidden_size
        if math.prod(shape) != width:
            raise ConfigError(
                f"tensor {_MASK} of {self.folder} has {math.prod(shape)} numbers, not the {width} of {self._states()} "
                "states of the target"
            )

    @property
    def _own_head(self) -> bool:
        """True if the head has its own output matrix: draft_vocab_size is set, or the file has the tensor."""
        own = self.raw.get("draft_vocab_size") is not None or _HEAD in self.tensors
        if not own and self.raw["hidden_size"] != self.target.hidden_size:
            raise ConfigError(
                f"{self.folder} has no {_HEAD}, and the target's does not fit: its inputs have "
                f"{self.target.hidden_size} dimensions, the draft's states {self.raw['hidden_size']}"
            )
        return own

    def _input_norm(self, layer: int) -> str:
        """Name of the norm before a layer's attention; layers after the first are published with either name."""
        both = layer == 0 or f"layers.{layer}.hidden_norm.weight" in self.tensors
        return "hidden_norm" if both else "input_layernorm"

    def _spare_norms(self, config: ModelConfig) -> list[str]:
        """Unused norms that are published with layers after the first."""
        layers = range(1, len(config.layers))
        return [f"layers.{i}.input_layernorm.weight" for i in layers if self._input_norm(i) == "hidden_norm"]

    def _fusion_shapes(self, hidden: int) -> _Shapes:
        states, width = self._states(), self.target.hidden_size
        shapes: _Shapes = {}
        if self._aux or "fc.weight" in self.tensors or hidden != width:
            shapes["fc.weight"] = (hidden, states * width)
            if self.raw.get("bias", "fc.bias" in self.tensors):
                shapes["fc.bias"] = (hidden,)
        each = bool(self.raw.get("fc_norm", False) or self.raw.get("use_aux_norm", False))
        whole = bool(self.raw.get("norm_before_fc", False))
        if each or "fc_norm.0.weight" in self.tensors:
            shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(states)}
        if whole or "norm_before_fc.weight" in self.tensors:
            shapes["norm_before_fc.weight"] = (states * width,)
        if each and whole:
            raise ConfigError(
                f"{self.folder / 'config.json'} has both fc_norm and norm_before_fc; remove the one that is not used"
            )
        return shapes

    def _fusion(self, hidden: int) -> bytes:
        shapes = self._fusion_shapes(hidden)
        tensors = {name: self.tensors.read(name, shapes[name]) for name in sorted(shapes)}
        # safetensors writes memory in its present order and ignores strides.
        return save({name: np.array(tensor, order="C") for name, tensor in tensors.items()}) if shapes else b""

    def _target_ids(self, entries: int) -> NDArray[np.int32] | None:
        """The target's id of each entry of the head; None if the ids are equal. Raises ConfigError."""
        vocab = self.target.vocab_size
        if _OFFSETS not in self.tensors and not self.tensors.invented:
            if entries != vocab:
                raise ConfigError(
                    f"{self.folder} lacks {_OFFSETS}, which maps the {entries} entries of its head to the {vocab} "
                    "tokens of the target"
                )
            return None
        ids = target_ids(self.tensors.read(_OFFSETS, (entries,), integers=True), vocab)
        if ids is None:
            raise ConfigError(
                f"tensor {_OFFSETS} of {self.folder} must hold offsets, so that {_OFFSETS}[i] + i ascends and stays "
                f"below the target's {vocab} tokens; it may hold ids, or belong to another vocabulary"
            )
        self._check_members(ids)
        return None if entries == vocab else ids.astype(np.int32)

    def _check_members(self, ids: NDArray[np.int64]) -> None:
        if _MEMBERS not in self.tensors:
            return
        members = self.tensors.read(_MEMBERS, (self.target.vocab_size,), integers=True)
        if not np.array_equal(np.flatnonzero(members), ids):
            raise ConfigError(f"tensors {_OFFSETS} and {_MEMBERS} of {self.folder} name different tokens")

    def _load(
        self, tensors: Tensors, config: ModelConfig, shapes: _Shapes, ids: NDArray[np.int32] | None, dtype: Any
    ) -> Params:
        put, hidden = putter(dtype), config.hidden_size
        params: Params = {"norm": put(tensors.read(_NORM, shapes[_NORM]))}
        params["layers"] = [
            layer_params(tensors, f"layers.{i}.", layer, hidden, put, self._input_norm(i))
            for i, layer in enumerate(config.layers)
        ]
        if _EMBED in shapes:
            params["embed"] = put(tensors.read(_EMBED, shapes[_EMBED]))
        params |= self.target.embedding_and_head(put, embedding=_EMBED not in shapes, head=_HEAD not in shapes)
        if _HEAD in shapes:
            params["head"] = put(tensors.read(_HEAD, shapes[_HEAD]).T)
        if ids is not None:
            params["ids"] = jnp.asarray(ids)
        if _MASK in shapes:
            fusion = Fusion(self._states(), math.prod(shapes[_MASK]), self.raw.get("rms_norm_eps", 1e-6))
            states = jnp.asarray(tensors.read(_MASK, shapes[_MASK]).reshape(-1).astype(np.float32))
            own = {name: jnp.asarray(array, jnp.float32) for name, array in read_fusion(tensors, fusion.states).items()}
            params["mask"] = fusion(own, states).astype(dtype)
        return params
