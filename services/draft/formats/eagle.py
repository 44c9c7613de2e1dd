"""EAGLE-1 and -2 heads: Llama layers behind `fc`, which fuses the embedding and the target's normed state.

Differences to a Llama: layer 0 has no input norm, there is no final norm, `fc` has a bias unless config.json denies it,
embedding and head are the target's, and names lack `model.` except in files that were converted for SGLang. The output
predicts the target's state, so its logits use the target's factor and softcap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.checkpoints.config_json import load_config, values_of
from outrider.config import LoadFormat
from outrider.errors import ConfigError
from outrider.serving.features import FeatureSpec
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.target import TargetCheckpoint, check_fit, target_logits
from services.draft.model.layers.config import Layer, Mlp, ModelConfig, attention_of, check_activation
from services.draft.model.layers.heads import EagleHead
from services.draft.model.params import Params
from services.draft.model.weights.arrays import layer_params, layer_shapes, putter
from services.draft.model.weights.dummy import open_tensors
from services.draft.model.weights.tensors import Tensors

_WHAT = "an EAGLE head"
_FC, _BIAS = "fc.weight", "fc.bias"
_NOT_READ = ("embed_tokens.weight", "lm_head.weight")  # frozen copies of the target's


def read_eagle(folder: Path, target: TargetCheckpoint, load_format: LoadFormat = "auto") -> DraftCheckpoint:
    """An EAGLE-1 or -2 head. Raises ConfigError with the part that does not fit."""
    raw = load_config(folder)
    with open_tensors(folder, plain_name, load_format) as tensors:
        with values_of(folder / "config.json"):
            config = _config(raw, tensors, target)
        check_fit(folder, target, vocab_size=raw.get("vocab_size", target.vocab_size), hidden_size=config.hidden_size)
        if "midlayer.self_attn.q_proj.weight" in tensors or "d2t" in tensors:
            raise ConfigError(f"{folder} holds an EAGLE-3 head; load it with --speculative-algorithm EAGLE3")
        shapes = _shapes(config, bias=raw.get("bias", _BIAS in tensors))
        tensors.check(_WHAT, shapes, _NOT_READ)

    def load(dtype: Any) -> Params:
        with open_tensors(folder, plain_name, load_format) as tensors:
            return _load(tensors, config, shapes, dtype) | target.embedding_and_head(putter(dtype))

    return DraftCheckpoint(config, load, FeatureSpec(final=True), shared=target.shared())


def plain_name(name: str) -> str:
    """A published tensor's name as this reader knows it."""
    return name.removeprefix("model.")


def _config(raw: dict[str, Any], tensors: Tensors, target: TargetCheckpoint) -> ModelConfig:
    check_activation(raw)
    hidden, epsilon = raw["hidden_size"], raw.get("rms_norm_eps", 1e-6)
    qkv_bias = bool(raw.get("qkv_bias", "layers.0.self_attn.q_proj.bias" in tensors))
    factor, softcap = target_logits(target)
    layers = tuple(
        Layer(attention_of(raw, qkv_bias=qkv_bias), Mlp(raw["intermediate_size"]), epsilon, input_norm=i > 0)
        for i in range(raw["num_hidden_layers"])
    )
    return ModelConfig(
        architecture=(raw.get("architectures") or ["EAGLE"])[0],
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        layers=layers,
        context=int(raw.get("max_position_embeddings", 2048)),
        head=EagleHead(epsilon),
        eos_token_ids=target.eos_token_ids,
        softcap=softcap,
        factor=factor,
    )


def _shapes(config: ModelConfig, *, bias: bool) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {_FC: (hidden, 2 * hidden)}
    if bias:
        shapes[_BIAS] = (hidden,)
    for i, layer in enumerate(config.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(layer, hidden).items()}
    return shapes


def _load(tensors: Tensors, config: ModelConfig, shapes: dict[str, tuple[int, ...]], dtype: Any) -> Params:
    put = putter(dtype)
    params: Params = {"fuse": put(tensors.read(_FC, shapes[_FC]).T)}
    if _BIAS in shapes:
        params["fuse_bias"] = put(tensors.read(_BIAS, shapes[_BIAS]))
    params["layers"] = [
        layer_params(tensors, f"layers.{i}.", layer, config.hidden_size, put) for i, layer in enumerate(config.layers)
    ]
    return params
