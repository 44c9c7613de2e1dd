"""From published tensors to the parameters of decoder layers: names and shapes, and what is joined for speed.

Params: embed [V, H] (absent where the head is tied), head [H, V], layers: one dict a layer, and what the head's
description names; ids [V] int32 where the head's entries are not the target's ids in order.
Matrices are [in, out]: XLA's CPU matrix products over a few rows run a fifth faster than from [out, in].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from services.draft.model.config import Layer
from services.draft.model.tensors import Tensors

Put = Callable[[NDArray[Any]], jax.Array]


def putter(dtype: Any) -> Put:
    """Puts arrays of floating-point numbers onto the device."""
    return lambda array: jnp.array(np.ascontiguousarray(array.astype(np.float32)), dtype=dtype)


def layer_shapes(layer: Layer, hidden: int, input_norm: str = "input_layernorm") -> dict[str, tuple[int, ...]]:
    """The tensors of a layer by name, as most formats publish them.

    hidden: numbers of a state. input_norm: name of the norm before attention.
    """
    attention, mlp = layer.attention, layer.mlp
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (hidden,)}
    if layer.input_norm:
        shapes[f"{input_norm}.weight"] = (hidden,)
    if layer.beside:
        shapes["input_layernorm.weight"] = (attention.width - hidden,)
    projections = {
        "self_attn.q_proj": (q, attention.width, attention.qkv_bias),
        "self_attn.k_proj": (kv, attention.width, attention.qkv_bias),
        "self_attn.v_proj": (kv, attention.width, attention.qkv_bias),
        "self_attn.o_proj": (hidden, q, attention.output_bias),
        "mlp.gate_proj": (mlp.width, hidden, mlp.bias),
        "mlp.up_proj": (mlp.width, hidden, mlp.bias),
        "mlp.down_proj": (hidden, mlp.width, mlp.bias),
    }
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if attention.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (attention.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def layer_params(
    tensors: Tensors, prefix: str, layer: Layer, hidden: int, put: Put, input_norm: str = "input_layernorm"
) -> dict[str, jax.Array]:
    """The parameters of a layer. prefix: before the names of its tensors; others as of `layer_shapes`."""
    shapes = layer_shapes(layer, hidden, input_norm)

    def read(name: str) -> NDArray[Any]:
        return tensors.read(prefix + name, shapes[name])

    params = {"mlp_norm": put(read("post_attention_layernorm.weight"))}
    if layer.input_norm:
        params["attention_norm"] = put(read(f"{input_norm}.weight"))
    if layer.beside:
        params["beside_norm"] = put(read("input_layernorm.weight"))
    groups = {
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.attention.qkv_bias),
        "output": (("self_attn.o_proj",), layer.attention.output_bias),
        "gate_up": (("mlp.gate_proj", "mlp.up_proj"), layer.mlp.bias),
        "down": (("mlp.down_proj",), layer.mlp.bias),
    }
    for name, (projections, bias) in groups.items():
        params[name] = put(np.concatenate([read(f"{part}.weight") for part in projections]).T)
        if bias:
            params[f"{name}_bias"] = put(np.concatenate([read(f"{part}.bias") for part in projections]))
    if layer.attention.qk_norm:
        params |= {name: put(read(f"self_attn.{name}.weight")) for name in ("q_norm", "k_norm")}
    return params
