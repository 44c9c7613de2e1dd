"""Whole decoders, which STANDALONE drafts with: the supported architectures, and how their weights are read.

All of them have Llama's tensor names; models with a vision tower put a prefix before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.checkpoints.config_json import load_config, values_of
from outrider.config import LoadFormat
from outrider.errors import ConfigError
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.gemma import describe_gemma, describe_gemma3_text
from services.draft.formats.llama import describe_llama
from services.draft.model.layers.config import ModelConfig
from services.draft.model.params import Params
from services.draft.model.weights.arrays import layer_params, layer_shapes, putter
from services.draft.model.weights.dummy import open_tensors

_READERS = {
    "LlamaForCausalLM": describe_llama, "MistralForCausalLM": describe_llama, "Qwen2ForCausalLM": describe_llama,
    "Qwen3ForCausalLM": describe_llama, "SmolLM3ForCausalLM": describe_llama, "GemmaForCausalLM": describe_gemma,
    "Gemma2ForCausalLM": describe_gemma, "Gemma3ForCausalLM": describe_gemma,
    "Gemma3ForConditionalGeneration": describe_gemma3_text,
}  # fmt: skip
_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_IMAGES = ("vision_tower.", "multi_modal_projector.")
_NOT_READ = ".not_read"


def read_decoder(folder: Path, load_format: LoadFormat = "auto") -> DraftCheckpoint:
    """A decoder checkpoint. Raises ConfigError."""
    config = read_config(folder)
    return DraftCheckpoint(config, lambda dtype: load_params(folder, config, dtype, load_format))


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint. Raises ConfigError for an unsupported model."""
    raw = load_config(folder)
    with values_of(folder / "config.json"):
        architecture = str((raw.get("architectures") or ["none"])[0])
    if architecture not in _READERS:
        raise ConfigError(
            f"{folder} holds a {architecture}; a draft model must be one of {', '.join(_READERS)}. "
            "Choose another draft model, or --speculative-algorithm NGRAM"
        )
    with values_of(folder / "config.json"):
        return _READERS[architecture](raw, architecture)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, as name and shape."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {_EMBED: (vocab, hidden), _NORM: (hidden,)}
    if not config.tied_head:
        shapes[_HEAD] = (vocab, hidden)
    for i, layer in enumerate(config.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(layer, hidden).items()}
    return shapes


def load_params(folder: Path, config: ModelConfig, dtype: Any, load_format: LoadFormat = "auto") -> Params:
    """Load a checkpoint's weights onto the device. Raises ConfigError with the tensor that does not fit."""
    put, shapes = putter(dtype), expected_shapes(config)
    offset = 1.0 if config.architecture.startswith("Gemma") else 0.0  # Gemma's norms multiply by 1 + weight
    with open_tensors(folder, plain_name, load_format) as tensors:
        # Files with a tied head may store the head again.
        tensors.check(f"a {config.architecture}", shapes, [_NOT_READ, *([_HEAD] if config.tied_head else [])])
        embed = tensors.read(_EMBED, shapes[_EMBED])
        params: Params = {"norm": put(tensors.read(_NORM, shapes[_NORM]).astype("float32") + offset)}
        if config.tied_head:
            params["head"] = put(embed.T)
        else:
            params["embed"] = put(embed)
            params["head"] = put(tensors.read(_HEAD, shapes[_HEAD]).T)
        params["layers"] = [
            layer_params(tensors, f"model.layers.{i}.", layer, config.hidden_size, put, norm_offset=offset)
            for i, layer in enumerate(config.layers)
        ]
    return params


def plain_name(name: str) -> str:
    if name.removeprefix("model.").startswith(_IMAGES):
        return name + _NOT_READ
    for prefix in ("language_model.model.", "model.language_model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")
