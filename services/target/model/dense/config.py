"""The settings of a dense decoder, from its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from services.target.kernels.cpu.programs.rotary import UnknownRotary, rope_parameters

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
# Keys by which a checkpoint may differ from the decoders here.
_FOREIGN = ("quantization_config", "auto_map", "text_config", "vision_config", "partial_rotary_factor")
_FULL = "full_attention"


class Unknown(Exception):
    """The settings are not those of a decoder that is known here; the message has the reason."""


@dataclass(frozen=True)
class DenseConfig:
    """The settings of a dense decoder, by the names of `transformers`.

    projection_bias, output_bias: of the attention's layers; head_norms: queries and keys are normalised
    rope_parameters: kind and numbers of the rotary embedding, as of `transformers` 5
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    projection_bias: bool
    output_bias: bool
    head_norms: bool
    rope_parameters: Mapping[str, Any]
    dtype: torch.dtype | None
    eos_token_id: int | list[int] | None
    hidden_act: str = "silu"

    def get_text_config(self) -> DenseConfig:
        """As of `transformers`: the settings of the decoder."""
        return self


def dense_config(content: Mapping[str, Any]) -> DenseConfig:
    """The settings in a config.json. Raises Unknown."""
    kind = content.get("model_type")
    if kind not in _CLASSES or content.get("architectures") != [_CLASSES[kind]]:
        raise Unknown("it is another kind of model")
    if foreign := next((name for name in _FOREIGN if content.get(name) is not None), None):
        raise Unknown(f"it has {foreign}")
    if content.get("hidden_act") != "silu" or content.get("mlp_bias"):
        raise Unknown("its feed-forward layers are others")
    if set(content.get("layer_types") or [_FULL]) != {_FULL} or _has_window(kind, content):
        raise Unknown("its attention has a window")
    if "eos_token_id" not in content:
        raise Unknown("the end-of-sequence id is that of the class")
    numbers: dict[str, Any] = {name: _number(content, name) for name in _NUMBERS}
    heads, own = numbers["num_attention_heads"], content.get("head_dim")
    if kind == "qwen3" or (own is not None and kind != "qwen2"):
        head_dim = _number(content, "head_dim")
    elif numbers["hidden_size"] % heads:
        raise Unknown("its width is no multiple of its heads")
    else:
        head_dim = numbers["hidden_size"] // heads
        if own not in (None, head_dim):
            raise Unknown("its heads have another width")
    bias = bool(content.get("attention_bias")) and kind in ("llama", "qwen3")
    return DenseConfig(
        model_type=kind, architecture=_CLASSES[kind], **numbers, head_dim=head_dim,
        rms_norm_eps=_positive(content, "rms_norm_eps"), tie_word_embeddings=bool(content.get("tie_word_embeddings")),
        projection_bias=bias or kind == "qwen2", output_bias=bias, head_norms=kind == "qwen3",
        rope_parameters=_rope(content), dtype=_dtype(content), eos_token_id=content["eos_token_id"],
    )  # fmt: skip


def _has_window(kind: str, content: Mapping[str, Any]) -> bool:
    if kind == "mistral":  # whose class has a window where config.json says nothing
        return content.get("sliding_window", 0) is not None
    return kind in ("qwen2", "qwen3") and bool(content.get("use_sliding_window"))


def _number(content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    if type(value) is not int or value < 1:
        raise Unknown(f"its {name} is {value!r:.40}")
    return value


def _positive(content: Mapping[str, Any], name: str) -> float:
    value: Any = content.get(name)
    if type(value) not in (int, float) or not 0.0 < value < math.inf:
        raise Unknown(f"its {name} is {value!r:.40}")
    return float(value)


def _rope(content: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return rope_parameters(content)
    except UnknownRotary as reason:
        raise Unknown(str(reason)) from None


def _dtype(content: Mapping[str, Any]) -> torch.dtype | None:
    name = content.get("dtype") or content.get("torch_dtype")
    if name is None:
        return None
    if name not in ("float32", "bfloat16", "float16"):
        raise Unknown(f"its dtype is {name!r:.40}")
    found: torch.dtype = getattr(torch, name)
    return found
