"""EAGLE-3: a linear layer fuses three states of the target; the head's own vocabulary is a part of the target's.

Published names and shapes: config.json as Llama's, `midlayer.*`, `fc`, `norm`, `lm_head`, offsets `d2t`, members `t2d`.
The embedding is the target's and is not stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
from outrider.serving.features import FeatureSpec
from services.draft.model.config import Attention, Layer, Mlp, ModelConfig, attention_of
from services.draft.model.formats.target import Target, read_norm
from services.draft.model.heads import Eagle3Head, Params
from services.draft.model.narrow import product
from services.draft.train.algorithms.base import Algorithm, Shape

_STATES = 3
_NOISE, _SOFTER = 0.3, 0.3  # of the first fusion; of the target's head
_CONTEXT = 8192  # tokens that the head claims to follow, if the target does


class Eagle3(Algorithm):
    """An EAGLE-3 head of a target."""

    def __init__(self, target: Target, shape: Shape) -> None:
        """Raises ConfigError for a shape that the target does not allow."""
        raw = load_json(target.folder / "config.json")
        self._raw = raw.get("text_config") or raw
        self._shape = shape
        self._hidden = target.hidden_size
        self._target_vocab = target.vocab_size
        self.aux_layers = _aux_layers(target, shape.aux_layers)
        self.states = FeatureSpec(tuple(layer + 1 for layer in self.aux_layers), final=True)
        self.config = self._config()
        self.model = self._model(target)

    def _config(self) -> dict[str, Any]:
        """The published config.json."""
        raw, heads = self._raw, self._raw["num_attention_heads"]
        rope = dict(raw.get("rope_parameters") or {})
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self._hidden,
            "intermediate_size": self._shape.inner or raw["intermediate_size"],
            "num_hidden_layers": self._shape.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or self._hidden // heads,
            "hidden_act": "silu",
            "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
            "rope_theta": float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            "max_position_embeddings": min(int(raw.get("max_position_embeddings", _CONTEXT)), _CONTEXT),
            "attention_bias": False,
            "mlp_bias": False,
            "bias": False,
            "tie_word_embeddings": False,
            "vocab_size": self._target_vocab,
            "draft_vocab_size": self._shape.vocab,
            "target_hidden_size": self._hidden,
            "num_aux_hidden_states": _STATES,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            },
            "norm_before_residual": False,
            "torch_dtype": "bfloat16",
        }

    def _model(self, target: Target) -> ModelConfig:
        raw, hidden = self.config, self._hidden
        epsilon = raw["rms_norm_eps"]
        layers = tuple(
            Layer(
                attention_of(raw, width=hidden if i else 2 * hidden),
                Mlp(raw["intermediate_size"]),
                epsilon,
                beside=i == 0,
            )
            for i in range(raw["num_hidden_layers"])
        )
        return ModelConfig(
            architecture=raw["architectures"][0],
            vocab_size=raw["draft_vocab_size"],
            hidden_size=hidden,
            layers=layers,
            context=raw["max_position_embeddings"],
            head=Eagle3Head(epsilon),
            eos_token_ids=target.eos_token_ids,
        )

    # --- parameters ---

    def first_params(self, target: Target, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int) -> Params:
        """The highest state nearly as it is, at a common scale with the others; norm and head are the target's own, the
        head's less sure of itself; the rest is random. So the first guesses are poor, but have the target's shape.
        """
        rng = np.random.default_rng(seed)

        def matrix(inputs: int, outputs: int, scale: float = 1.0) -> jax.Array:
            return jnp.asarray(scale * rng.standard_normal((inputs, outputs)) / np.sqrt(inputs), jnp.float32)

        hidden = self._hidden
        head = np.asarray(target.embedding_and_head(_plain, embedding=False)["head"])[:, ids]
        fusion = _NOISE * np.asarray(matrix(_STATES * hidden, hidden))
        fusion[-hidden:] += np.eye(hidden)
        fusion /= np.repeat(scales[:_STATES], hidden)[:, None]
        return {
            "fc": jnp.asarray(fusion, jnp.float32),
            "norm": jnp.asarray(read_norm(target).astype(np.float32)),
            "head": jnp.asarray(_SOFTER * head, jnp.float32),
            "layers": [self._first_layer(layer, matrix) for layer in self.model.layers],
        }

    def _first_layer(self, layer: Layer, matrix: Callable[..., jax.Array]) -> Params:
        assert isinstance(layer.attention, Attention)
        assert isinstance(layer.mlp, Mlp)
        a, hidden = layer.attention, self._hidden
        qkv = matrix(a.width, (a.heads + 2 * a.kv_heads) * a.head_dim)
        params = {
            "attention_norm": jnp.ones(hidden, jnp.float32),
            "mlp_norm": jnp.ones(hidden, jnp.float32),
            "qkv": _see_themselves(np.array(qkv), a, matrix(hidden, a.kv_heads * a.head_dim)) if layer.beside else qkv,
            "output": matrix(a.heads * a.head_dim, hidden, 0.5),
            "gate_up": matrix(hidden, 2 * layer.mlp.width),
            "down": matrix(layer.mlp.width, hidden, 0.5),
        }
        return params | ({"beside_norm": jnp.ones(hidden, jnp.float32)} if layer.beside else {})

    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """The fusion layer."""
        return product(states, params["fc"])

    # --- the published folder ---

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json and model.safetensors in bfloat16, each in one piece or not at all."""
        tensors = {"fc.weight": params["fc"].T, "norm.weight": params["norm"], "lm_head.weight": params["head"].T}
        for i, (layer, own) in enumerate(zip(self.model.layers, params["layers"], strict=True)):
            prefix = f"layers.{i}." if i else "midlayer."
            tensors |= {prefix + name: tensor for name, tensor in _layer_tensors(layer, own).items()}
        arrays: dict[str, NDArray[Any]] = {
            name: np.ascontiguousarray(np.asarray(tensor).astype(ml_dtypes.bfloat16))
            for name, tensor in tensors.items()
        }
        arrays["d2t"] = ids - np.arange(len(ids))
        arrays["t2d"] = np.isin(np.arange(self._target_vocab), ids)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "model.safetensors.part"
        safetensors.numpy.save_file(arrays, part, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")
        part.replace(folder / "model.safetensors")


def _see_themselves(qkv: NDArray[np.float32], a: Attention, keys: jax.Array) -> jax.Array:
    """Let a query head of each group begin with the key of its group, which is of the token's embedding alone.

    So rows first see themselves and equal tokens nearby: only through attention does a row's token reach its output.
    qkv: [2H, heads + 2 key heads], changed; keys: [H, key heads]
    """
    group, dim, hidden = a.heads // a.kv_heads, a.head_dim, len(keys)
    for head in range(0, a.kv_heads, 1 if group > 1 else 2):
        own = np.asarray(keys[:, head * dim : (head + 1) * dim])
        for column in (head * group * dim, (a.heads + head) * dim):
            qkv[:hidden, column : column + dim] = own
            qkv[hidden:, column : column + dim] = 0
    return jnp.asarray(qkv)


def _layer_tensors(layer: Layer, params: Mapping[str, Any]) -> dict[str, Any]:
    """Published tensors of a layer, [out, in]."""
    assert isinstance(layer.attention, Attention)
    a = layer.attention
    ends = np.cumsum([a.heads * a.head_dim, a.kv_heads * a.head_dim])
    q, k, v = np.split(np.asarray(params["qkv"]).T, ends)
    gate, up = np.split(np.asarray(params["gate_up"]).T, 2)
    tensors = {
        "hidden_norm.weight": params["attention_norm"],
        "post_attention_layernorm.weight": params["mlp_norm"],
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": params["output"].T,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": params["down"].T,
    }
    return tensors | ({"input_layernorm.weight": params["beside_norm"]} if layer.beside else {})


def _aux_layers(target: Target, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    layers = target.layers
    wanted = chosen or (1, layers // 2 - 1, layers - 4)
    if len(wanted) != _STATES or list(wanted) != sorted(set(wanted)) or wanted[0] < 0 or wanted[-1] >= layers:
        raise ConfigError(
            f"EAGLE-3 is fed with three of the target's {layers} layers, ascending, counted from 0; name them with "
            f"--aux-layers (found {' '.join(map(str, wanted))})"
        )
    return tuple(wanted)


def _plain(array: NDArray[Any]) -> Any:
    """`Put` without a device."""
    return array.astype(np.float32)
