"""Whole decoders in the format of Llama, Mistral, Qwen2 and Qwen3: drafts of STANDALONE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.checkpoint import load_json
from outrider.errors import ConfigError
from services.draft.model.config import Layer, Mlp, ModelConfig, attention_of, check_activation, eos_of
from services.draft.model.heads import Params, TokenHead
from services.draft.model.tensors import Tensors
from services.draft.model.weights import layer_params, layer_shapes, putter

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint. Raises ConfigError for what this decoder cannot compute."""
    raw = load_json(folder / "config.json")
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{folder} holds a {architecture}; a draft model must be one of {', '.join(ARCHITECTURES)}. "
            "Choose another draft model, or --speculative-algorithm NGRAM"
        )
    try:
        return _from_raw(raw, architecture)
    except KeyError as error:
        raise ConfigError(f"{folder / 'config.json'} lacks {error}") from None


def _from_raw(raw: dict[str, Any], architecture: str) -> ModelConfig:
    check_activation(raw)
    bias = bool(raw.get("attention_bias", False))
    qwen2 = architecture == "Qwen2ForCausalLM"
    epsilon = raw.get("rms_norm_eps", 1e-6)
    attention = attention_of(
        raw,
        qkv_bias=bias or qwen2,
        output_bias=bias and not qwen2,
        qk_norm=architecture == "Qwen3ForCausalLM",
    )
    layer = Layer(attention, Mlp(raw["intermediate_size"], bool(raw.get("mlp_bias", False))), epsilon)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        layers=(layer,) * raw["num_hidden_layers"],
        context=_context(raw, architecture),
        head=TokenHead(epsilon),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=eos_of(raw),
    )


def _context(raw: dict[str, Any], architecture: str) -> int:
    # Attention is over everything, so a sliding window bounds the context instead.
    context = int(raw.get("max_position_embeddings", 2048))
    window = raw.get("sliding_window")
    slides = architecture == "MistralForCausalLM" or bool(raw.get("use_sliding_window"))
    return min(context, int(window)) if slides and window else context


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, as name and shape."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {_EMBED: (vocab, hidden), _NORM: (hidden,)}
    if not config.tied_head:
        shapes[_HEAD] = (vocab, hidden)
    for i, layer in enumerate(config.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(layer, hidden).items()}
    return shapes


def load_params(folder: Path, config: ModelConfig, dtype: Any) -> Params:
    """Load a checkpoint's weights onto the device. Raises ConfigError naming the tensor that does not fit."""
    put, shapes = putter(dtype), expected_shapes(config)
    with Tensors(folder) as tensors:
        # The head comes again where it is tied.
        tensors.check(config.architecture, shapes, [_HEAD] if config.tied_head else [])
        embed = tensors.read(_EMBED, shapes[_EMBED])
        params: Params = {"norm": put(tensors.read(_NORM, shapes[_NORM]))}
        if config.tied_head:
            params["head"] = put(embed.T)
        else:
            params["embed"] = put(embed)
            params["head"] = put(tensors.read(_HEAD, shapes[_HEAD]).T)
        params["layers"] = [
            layer_params(tensors, f"model.layers.{i}.", layer, config.hidden_size, put)
            for i, layer in enumerate(config.layers)
        ]
    return params
