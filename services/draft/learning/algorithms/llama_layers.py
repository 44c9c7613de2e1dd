"""Llama-like decoder layers, which several algorithms train: initial parameters, and published tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from outrider.checkpoints.disk import put_in_place, write_atomically
from services.draft.model.layers.config import Attention, Layer, Mlp
from services.draft.model.params import Params

_OUTPUT_SCALE = 0.5  # of the initial matrices whose products are added to the residual stream


class RandomInit:
    """Random initial matrices, float32."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def matrix(self, inputs: int, outputs: int, scale: float = 1.0) -> NDArray[np.float32]:
        """[inputs, outputs]; with scale 1 a product has the variance of its input."""
        numbers: NDArray[np.float64] = self._rng.standard_normal((inputs, outputs)) * (scale / np.sqrt(inputs))
        return numbers.astype(np.float32)


def first_layer(layer: Layer, hidden: int, init: RandomInit) -> Params:
    """Initial parameters of a layer, as the draft service has them."""
    assert isinstance(layer.attention, Attention)
    assert isinstance(layer.mlp, Mlp)
    a = layer.attention
    qkv = init.matrix(a.width, (a.heads + 2 * a.kv_heads) * a.head_dim)
    if layer.beside:
        _see_themselves(qkv, a, init.matrix(hidden, a.kv_heads * a.head_dim))
    params = {
        "mlp_norm": jnp.ones(hidden, jnp.float32),
        "qkv": jnp.asarray(qkv),
        "output": jnp.asarray(init.matrix(a.heads * a.head_dim, hidden, _OUTPUT_SCALE)),
        "gate_up": jnp.asarray(init.matrix(hidden, 2 * layer.mlp.width)),
        "down": jnp.asarray(init.matrix(layer.mlp.width, hidden, _OUTPUT_SCALE)),
    }
    if a.qkv_bias:
        params["qkv_bias"] = jnp.zeros(qkv.shape[1], jnp.float32)
    if a.qk_norm:
        params |= {name: jnp.ones(a.head_dim, jnp.float32) for name in ("q_norm", "k_norm")}
    norms = {"attention_norm": layer.input_norm, "beside_norm": layer.beside}
    return params | {name: jnp.ones(hidden, jnp.float32) for name, there in norms.items() if there}


def _see_themselves(qkv: NDArray[np.float32], a: Attention, keys: NDArray[np.float32]) -> None:
    """Make one query head of each group start as the key of its group, which depends on the token's embedding alone.

    Rows then attend first to themselves and to equal tokens nearby; only through attention does a row's token reach its
    output. qkv: [2H, heads + 2 key heads], changed in place; keys: [H, key heads]
    """
    group, dim, hidden = a.heads // a.kv_heads, a.head_dim, len(keys)
    for head in range(0, a.kv_heads, 1 if group > 1 else 2):
        own = keys[:, head * dim : (head + 1) * dim]
        for column in (head * group * dim, (a.heads + head) * dim):
            qkv[:hidden, column : column + dim] = own
            qkv[hidden:, column : column + dim] = 0


def layer_tensors(layer: Layer, params: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of a layer by Llama's names, [out, in]. Norms of an EAGLE-3 layer's two inputs have EAGLE-3's names."""
    assert isinstance(layer.attention, Attention)
    a = layer.attention
    ends = np.cumsum([a.heads * a.head_dim, a.kv_heads * a.head_dim])
    q, k, v = np.split(np.asarray(params["qkv"]).T, ends)
    gate, up = np.split(np.asarray(params["gate_up"]).T, 2)
    tensors = {
        "post_attention_layernorm.weight": params["mlp_norm"],
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": params["output"].T,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": params["down"].T,
    }
    if a.qkv_bias:
        parts = np.split(np.asarray(params["qkv_bias"]), ends)
        tensors |= {f"self_attn.{name}_proj.bias": part for name, part in zip("qkv", parts, strict=True)}
    if a.qk_norm:
        tensors |= {f"self_attn.{name}.weight": params[name] for name in ("q_norm", "k_norm")}
    if layer.beside:
        names = {"input_layernorm.weight": "beside_norm", "hidden_norm.weight": "attention_norm"}
    else:
        names = {"input_layernorm.weight": "attention_norm"} if layer.input_norm else {}
    return tensors | {name: params[own] for name, own in names.items()}


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], whole: Mapping[str, NDArray[Any]] | None = None
) -> None:
    """Write config.json and model.safetensors in bfloat16, each whole or not at all.

    whole: tensors that keep their own format
    """
    arrays: dict[str, NDArray[Any]] = {
        name: np.ascontiguousarray(np.asarray(tensor).astype(ml_dtypes.bfloat16)) for name, tensor in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    safetensors.numpy.save_file(arrays | dict(whole or {}), part, {"format": "pt"})
    write_atomically(folder / "config.json", json.dumps(config, indent=1) + "\n")
    put_in_place(part, folder / "model.safetensors")


def plain(array: NDArray[Any]) -> NDArray[np.float32]:
    """`Put` that keeps arrays in NumPy, as float32."""
    return array.astype(np.float32)
