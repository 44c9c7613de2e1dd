"""DFlash and DFlash 2 block drafters, as z-lab and SpecForge publish them, and SGLang reads them.

`fc` concatenates states of the target and makes the context of all layers from them; the target gets it and applies it.
`hidden_norm` norms the context, the layers are Qwen3's, and `norm` stands before the logits. The embedding and the head
are the target's. config.json is Qwen3's with these keys, in dflash_config or beside it:

    block_size           positions of a block, the root included
    target_layer_ids     the target's layers whose outputs are the states, from 0
    mask_token_id        whose embedding stands at positions to predict; else mask_token, added behind the vocabulary
    is_causal            positions see only those before them in the block; by default in layers with a window
    output_multiplier, final_logit_softcapping, input_embedding_scale    as the names say

DFlash 2 adds convolutions to the layers (conv_kernel_size, conv_group_size), and a selector (selector_rank,
selector_top_k), which corrects the best candidates of a position by the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from outrider.checkpoints import checkpoint
from outrider.checkpoints.config_json import load_config, values_of
from outrider.config import LoadFormat
from outrider.errors import ConfigError
from outrider.placement.memory import SCRATCH_SLOTS
from outrider.serving.features import FeatureSpec
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.target import TargetCheckpoint, check_fit
from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of, check_activation
from services.draft.model.layers.heads import BlockHead
from services.draft.model.params import Params
from services.draft.model.weights.arrays import layer_params, layer_shapes, putter
from services.draft.model.weights.dummy import open_tensors
from services.draft.model.weights.tensors import Tensors

_WHAT = "a DFlash drafter"
_DEFAULT_SIZE = 16
_DEFAULT_MASK = "<|MASK|>"
_FUSION, _CONTEXT_NORM, _NORM = "fc.weight", "hidden_norm.weight", "norm.weight"
_SELECTOR = "candidate_selector.hidden_projection.weight"
_PREVIOUS, _NEXT = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
_NOT_READ = ("embed_tokens.weight", "lm_head.weight")  # copies of the target's
# Of later formats: these change what is computed, so a drafter with them is refused.
_UNKNOWN = (
    "projector_type", "attention_sink_bias", "attention_value_scale",
    "has_embed_tokens", "has_lm_head", "markov_rank", "draft_vocab_size",
)  # fmt: skip
_Shapes = dict[str, tuple[int, ...]]


def read_dflash(folder: Path, target: TargetCheckpoint, load_format: LoadFormat = "auto") -> DraftCheckpoint:
    """A block drafter. Raises ConfigError with the part that does not fit."""
    raw = load_config(folder)
    with open_tensors(folder, plain_name, load_format) as tensors, values_of(folder / "config.json"):
        return _Reader(folder, flat(raw), target, load_format).draft(tensors)


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    """All keys of a config.json in one dict: those of dflash_config override the others; null values are dropped."""
    parts = raw, raw.get("dflash_config") or {}
    return {key: value for part in parts for key, value in part.items() if value is not None}


def plain_name(name: str) -> str:
    """The name of a published tensor without the prefix and the suffix that some files have."""
    name = name.removeprefix("model.")
    return name.removesuffix(".weight") if name.endswith("_codebook.weight") else name


@dataclass(frozen=True)
class _Reader:
    """Reads one drafter. raw: its flattened configuration."""

    folder: Path
    raw: dict[str, Any]
    target: TargetCheckpoint
    load_format: LoadFormat

    def draft(self, tensors: Tensors) -> DraftCheckpoint:
        """Raises ConfigError for a part that does not fit, KeyError for a key that config.json lacks."""
        self._check_options()
        check_activation(self.raw)
        hidden, file = self.raw["hidden_size"], self.folder / "config.json"
        check_fit(
            self.folder, self.target, vocab_size=self.raw.get("vocab_size", self.target.vocab_size), hidden_size=hidden
        )
        states = self._states()
        config = self._config(hidden)
        fusion: _Shapes = {_FUSION: (hidden, len(states) * self.target.hidden_size)}
        shapes = self._shapes(config)
        tensors.check(_WHAT, shapes | fusion, _NOT_READ)
        matrix = np.array(tensors.read(_FUSION, fusion[_FUSION]), order="C")

        def load(dtype: Any) -> Params:
            with open_tensors(self.folder, plain_name, self.load_format) as opened, values_of(file):
                return self._load(opened, config, shapes, dtype)

        features = FeatureSpec(states, norm_epsilon=self.raw.get("rms_norm_eps", 1e-6))
        return DraftCheckpoint(config, load, features, save({_FUSION: matrix}), shared=self.target.shared())

    def _check_options(self) -> None:
        found = [key for key in _UNKNOWN if self.raw.get(key)]
        if self.raw.get("sample_from_anchor") is False or self.raw.get("shift_label"):
            found.append("sample_from_anchor" if "sample_from_anchor" in self.raw else "shift_label")
        if found:
            raise ConfigError(
                f"{self.folder / 'config.json'} has {' and '.join(found)}, which is not of the DFlash drafters that "
                "are supported; use one without"
            )

    # --- configuration ---

    def _states(self) -> tuple[int, ...]:
        """The states of the target, as FeatureSpec numbers them."""
        raw, layers, file = self.raw, self.target.layers, self.folder / "config.json"
        made_for = raw.get("num_target_layers", layers)
        if made_for != layers:
            raise ConfigError(
                f"{self.folder} was made for a target of {made_for} layers; {self.target.folder} has {layers}. Name "
                "the checkpoint that it belongs to with --model-path"
            )
        ids = raw.get("target_layer_ids") or default_layers(layers, raw["num_hidden_layers"])
        if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= layers:
            raise ConfigError(f"{file} names target layers {list(ids)} of {layers}; they must ascend, from 0 on")
        return tuple(int(i) + 1 for i in ids)

    def _size(self) -> int:
        size = int(self.raw.get("block_size", _DEFAULT_SIZE))
        if not 2 <= size <= SCRATCH_SLOTS:
            raise ConfigError(
                f"{self.folder / 'config.json'} has a block_size of {size}; from 2 to {SCRATCH_SLOTS} are supported"
            )
        return size

    def _mask_token(self) -> int:
        token = self.raw.get("mask_token_id")
        if token is None:
            tokens = checkpoint.vocabulary(self.target.folder)
            # As a tokenizer adds it: behind all others, if it is not there.
            token = tokens.get(self.raw.get("mask_token", _DEFAULT_MASK), max(tokens.values(), default=-1) + 1)
        if not 0 <= token < self.target.vocab_size:
            raise ConfigError(
                f"{self.folder / 'config.json'} has the mask token {token}, but the target's embedding has "
                f"{self.target.vocab_size} rows; set mask_token_id to the token that the drafter was trained with"
            )
        return int(token)

    def _config(self, hidden: int) -> ModelConfig:
        raw, epsilon = self.raw, self.raw.get("rms_norm_eps", 1e-6)
        bias = bool(raw.get("attention_bias", False))
        count = raw["num_hidden_layers"]
        kinds = raw.get("layer_types") or ["full_attention"] * count
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) < count:
            raise ConfigError(
                f"{self.folder / 'config.json'} has layer_types {kinds}; expected one of full_attention and "
                f"sliding_attention for each of its {count} layers"
            )
        slides = [kind == "sliding_attention" for kind in kinds[:count]]
        layers = tuple(
            Layer(
                attention_of(
                    raw, qkv_bias=bias, output_bias=bias, qk_norm=True,
                    window=int(raw["sliding_window"]) if window else None,
                ),
                Mlp(raw["intermediate_size"]),
                epsilon,
            )
            for window in slides
        )  # fmt: skip
        causal = tuple(slides) if "is_causal" not in raw else (bool(raw["is_causal"]),) * count
        return ModelConfig(
            architecture=(raw.get("architectures") or ["DFlashDraftModel"])[0],
            vocab_size=self.target.vocab_size,
            hidden_size=hidden,
            layers=layers,
            context=int(raw.get("max_position_embeddings", 2048)),
            head=BlockHead(
                epsilon,
                self._size(),
                self._mask_token(),
                causal,
                float(raw.get("input_embedding_scale", 1.0)),
                min(int(raw.get("selector_top_k", 0)), self.target.vocab_size),
                int(raw.get("conv_group_size", 0)),
            ),
            eos_token_ids=self.target.eos_token_ids,
            softcap=float(raw.get("final_logit_softcapping", 0.0)) or None,
            factor=float(raw.get("output_multiplier", 1.0)),
        )

    # --- tensors ---

    def _shapes(self, config: ModelConfig) -> _Shapes:
        hidden = config.hidden_size
        shapes: _Shapes = {_NORM: (hidden,), _CONTEXT_NORM: (hidden,)}
        for i, layer in enumerate(config.layers):
            own = layer_shapes(layer, hidden) | self._convolutions(hidden)
            shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
        if self.raw.get("selector_top_k"):
            rank = int(self.raw["selector_rank"])
            shapes |= {_SELECTOR: (rank, hidden), _PREVIOUS: (self.target.vocab_size, rank)}
            shapes[_NEXT] = shapes[_PREVIOUS]
        return shapes

    def _convolutions(self, hidden: int) -> _Shapes:
        """Tensors of a layer's convolutions."""
        group = int(self.raw.get("conv_group_size", 0))
        if not group:
            return {}
        taps = int(self.raw["conv_kernel_size"])
        if taps < 1 or hidden % group:
            raise ConfigError(
                f"{self.folder / 'config.json'} has convolutions of {taps} positions over groups of {group} of "
                f"{hidden} channels; groups must divide the channels"
            )
        shapes: _Shapes = {}
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"{part}.base_kernel"] = (2, taps, hidden)
            shapes[f"{part}.kernel_projection.weight"] = (2 * taps * hidden // group, hidden)
        return shapes

    def _load(self, tensors: Tensors, config: ModelConfig, shapes: _Shapes, dtype: Any) -> Params:
        put, hidden = putter(dtype), config.hidden_size
        params: Params = {
            "norm": put(tensors.read(_NORM, shapes[_NORM])),
            "context_norm": put(tensors.read(_CONTEXT_NORM, shapes[_CONTEXT_NORM])),
        }
        params["layers"] = []
        for i, layer in enumerate(config.layers):
            own, prefix = layer_params(tensors, f"layers.{i}.", layer, hidden, put), f"layers.{i}."
            for name in self._convolutions(hidden):
                part, kind = name.split(".", 1)
                tensor = tensors.read(prefix + name, shapes[prefix + name])
                own |= {f"{part}_base": put(tensor)} if kind == "base_kernel" else {part: put(tensor.T)}
            params["layers"].append(own)
        if _SELECTOR in shapes:
            params["selector"] = put(tensors.read(_SELECTOR, shapes[_SELECTOR]).T)
            for param, name in (("selector_previous", _PREVIOUS), ("selector_next", _NEXT)):
                params[param] = put(tensors.read(name, shapes[name]))
        return params | self.target.embedding_and_head(put)


def default_layers(target_layers: int, count: int) -> tuple[int, ...]:
    """The target's layers whose outputs are read where a configuration names none: `count`, evenly spaced.

    Raises ConfigError for a target with too few layers.
    """
    if count == 1:
        return (target_layers // 2,)
    first, last = 1, target_layers - 3
    if last - first < count - 1:
        raise ConfigError(f"a target of {target_layers} layers has too few for {count} states of a DFlash drafter")
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))
