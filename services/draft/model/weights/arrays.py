"""Parameters of decoder layers from published tensors: names, shapes, and matrices that are joined for speed.

Params: embed [V, H] (absent where the head is tied), head [H, V], layers: one dict a layer, and the parameters of the
head's description; ids [V] int32 where the head's entries are not the target's ids in order.
Matrices are [in, out]: XLA's CPU matrix products over a few rows are a fifth faster than from [out, in].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from services.draft.model.layers.config import Attention, Experts, LatentAttention, Layer, Mlp
from services.draft.model.weights.tensors import Tensors

Put = Callable[[NDArray[Any]], jax.Array]
Read = Callable[[str], NDArray[Any]]
LayerShapes = dict[str, tuple[int, ...]]


def putter(dtype: Any) -> Put:
    """A function that converts arrays of floating-point numbers and puts them onto the device."""
    return lambda array: jnp.array(np.ascontiguousarray(array.astype(np.float32)), dtype=dtype)


def layer_shapes(layer: Layer, hidden: int, input_norm: str = "input_layernorm") -> LayerShapes:
    """The tensors of a layer by name, as most formats publish them.

    hidden: hidden size. input_norm: name of the norm before attention.
    """
    shapes: LayerShapes = {f"{name}.weight": (hidden,) for name in _inner_norms(layer).values()}
    if layer.input_norm:
        shapes[f"{input_norm}.weight"] = (hidden,)
    if layer.beside:
        shapes["input_layernorm.weight"] = (layer.attention.width - hidden,)
    if isinstance(layer.attention, LatentAttention):
        shapes |= _latent_shapes(layer.attention, hidden)
    else:
        shapes |= _attention_shapes(layer.attention, hidden)
    if isinstance(layer.mlp, Experts):
        return shapes | _experts_shapes(layer.mlp, hidden)
    return shapes | _mlp_shapes("mlp.", layer.mlp, hidden)


def layer_params(
    tensors: Tensors,
    prefix: str,
    layer: Layer,
    hidden: int,
    put: Put,
    input_norm: str = "input_layernorm",
    norm_offset: float = 0.0,
) -> dict[str, jax.Array]:
    """The parameters of a layer. prefix: of the names of its tensors; other arguments as of `layer_shapes`.

    norm_offset: added to the published weights of norms.
    """
    shapes = layer_shapes(layer, hidden, input_norm)

    def read(name: str) -> NDArray[Any]:
        array = tensors.read(prefix + name, shapes[name])
        norm = norm_offset and name.endswith("norm.weight")
        return array.astype(np.float32) + np.float32(norm_offset) if norm else array

    params = {param: put(read(f"{name}.weight")) for param, name in _inner_norms(layer).items()}
    if layer.input_norm:
        params["attention_norm"] = put(read(f"{input_norm}.weight"))
    if layer.beside:
        params["beside_norm"] = put(read("input_layernorm.weight"))
    if isinstance(layer.attention, LatentAttention):
        params |= _latent_params(layer.attention, read, put)
    else:
        params |= _attention_params(layer.attention, read, put)
    if isinstance(layer.mlp, Experts):
        return params | _experts_params(layer.mlp, read, put)
    return params | _mlp_params("mlp.", layer.mlp, read, put)


def _inner_norms(layer: Layer) -> dict[str, str]:
    """Published names of the norms behind attention, by parameter."""
    if not layer.output_norms:
        return {"mlp_norm": "post_attention_layernorm"}
    return {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }


def _linear_shapes(linears: dict[str, tuple[int, int, bool]]) -> LayerShapes:
    """linears: rows, columns and whether there is a bias, by name."""
    weights: LayerShapes = {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in linears.items()}
    return weights | {f"{name}.bias": (rows,) for name, (rows, _, bias) in linears.items() if bias}


def _linear(params: dict[str, jax.Array], name: str, parts: tuple[str, ...], read: Read, put: Put, bias: bool) -> None:
    """Concatenate linear layers with the same input."""
    params[name] = put(np.concatenate([read(f"{part}.weight") for part in parts]).T)
    if bias:
        params[f"{name}_bias"] = put(np.concatenate([read(f"{part}.bias") for part in parts]))


# --- attention ---


def _attention_shapes(a: Attention, hidden: int) -> LayerShapes:
    value = a.value_dim or a.head_dim
    shapes = _linear_shapes(
        {
            "self_attn.q_proj": (a.heads * a.head_dim * (2 if a.gated and not a.head_gate else 1), a.width, a.qkv_bias),
            "self_attn.k_proj": (a.kv_heads * a.head_dim, a.width, a.qkv_bias),
            "self_attn.v_proj": (a.kv_heads * value, a.width, a.qkv_bias),
            "self_attn.o_proj": (hidden, a.heads * value, a.output_bias),
        }
    )
    if a.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (a.head_dim,) for name in ("q_norm", "k_norm")}
    if a.sinks:
        shapes["self_attn.sinks"] = (a.heads,)
    if a.head_gate:
        shapes["self_attn.g_proj.weight"] = (a.heads, a.width)
    return shapes


def _attention_params(a: Attention, read: Read, put: Put) -> dict[str, jax.Array]:
    params: dict[str, jax.Array] = {}

    def qkv(kind: str) -> NDArray[Any]:
        """Rows of queries, keys and values, then of gates."""
        q, k, v = (read(f"self_attn.{part}_proj.{kind}") for part in "qkv")
        gates = []
        if a.head_gate:  # the same gate for each number of a head
            gates = [np.repeat(read(f"self_attn.g_proj.{kind}"), a.head_dim, axis=0)]
        elif a.gated:
            both = q.reshape(a.heads, 2, a.head_dim, *q.shape[1:])
            q, gate = (both[:, i].reshape(-1, *q.shape[1:]) for i in range(2))
            gates = [gate]
        if a.value_scale != 1:
            v = v.astype(np.float32) * np.float32(a.value_scale)
        return np.concatenate([q, k, _widened(v, a.kv_heads, a.head_dim), *gates])

    params["qkv"] = put(qkv("weight").T)
    if a.qkv_bias:
        params["qkv_bias"] = put(qkv("bias"))
    params["output"] = put(_widened(read("self_attn.o_proj.weight").T, a.heads, a.head_dim))
    if a.output_bias:
        params["output_bias"] = put(read("self_attn.o_proj.bias"))
    if a.qk_norm:
        params |= {name: put(read(f"self_attn.{name}.weight")) for name in ("q_norm", "k_norm")}
    if a.sinks:
        params["sinks"] = put(read("self_attn.sinks"))
    return params


def _widened(rows: NDArray[Any], heads: int, dim: int) -> NDArray[Any]:
    """Rows of heads, padded with zeros to `dim` rows a head, for values narrower than keys."""
    narrow = len(rows) // heads
    if narrow == dim:
        return rows
    each = rows.reshape(heads, narrow, *rows.shape[1:])
    each = np.pad(each, [(0, 0), (0, dim - narrow), *[(0, 0)] * (rows.ndim - 1)])
    return each.reshape(-1, *rows.shape[1:])


def _latent_shapes(a: LatentAttention, hidden: int) -> LayerShapes:
    queries = a.heads * (a.plain_dim + a.rotary_dim)
    linears = {
        "self_attn.kv_a_proj_with_mqa": (a.rank + a.rotary_dim, a.width, a.bias),
        "self_attn.kv_b_proj": (a.heads * (a.plain_dim + a.value_dim), a.rank, False),
        "self_attn.o_proj": (hidden, a.heads * a.value_dim, a.bias),
    }
    shapes: LayerShapes = {"self_attn.kv_a_layernorm.weight": (a.rank,)}
    if a.query_rank:
        linears |= {
            "self_attn.q_a_proj": (a.query_rank, a.width, a.bias),
            "self_attn.q_b_proj": (queries, a.query_rank, False),
        }
        shapes["self_attn.q_a_layernorm.weight"] = (a.query_rank,)
    else:
        linears["self_attn.q_proj"] = (queries, a.width, False)
    return shapes | _linear_shapes(linears)


def _latent_params(a: LatentAttention, read: Read, put: Put) -> dict[str, jax.Array]:
    params = {"latent_norm": put(read("self_attn.kv_a_layernorm.weight"))}
    if a.query_rank:
        params["query_norm"] = put(read("self_attn.q_a_layernorm.weight"))
        _linear(params, "query_down", ("self_attn.q_a_proj",), read, put, a.bias)
    _linear(params, "output", ("self_attn.o_proj",), read, put, a.bias)
    queries = read("self_attn.q_b_proj.weight" if a.query_rank else "self_attn.q_proj.weight")
    each = queries.reshape(a.heads, -1, queries.shape[1])
    params["query"] = put(_in_halves(each, a.plain_dim, a.interleaved).reshape(queries.shape).T)
    for kind in ("weight", "bias") if a.bias else ("weight",):
        rows = read(f"self_attn.kv_a_proj_with_mqa.{kind}")
        params["latent" if kind == "weight" else "latent_bias"] = put(
            _in_halves(rows[None], a.rank, a.interleaved)[0].T
        )
    expand = read("self_attn.kv_b_proj.weight").reshape(a.heads, -1, a.rank)
    params["keys"] = put(expand[:, : a.plain_dim])
    params["values"] = put(expand[:, a.plain_dim :].swapaxes(1, 2))
    return params


def _in_halves(rows: NDArray[Any], first: int, interleaved: bool) -> NDArray[Any]:
    """Rows reordered so that pairs which are rotated together are half the width apart instead of side by side.

    rows: [heads, n, ...], of which the first ones are not rotated.
    """
    if not interleaved:
        return rows
    return np.concatenate([rows[:, :first], rows[:, first::2], rows[:, first + 1 :: 2]], axis=1)


# --- feed-forward part ---


def _mlp_shapes(prefix: str, mlp: Mlp, hidden: int) -> LayerShapes:
    return _linear_shapes(
        {
            f"{prefix}gate_proj": (mlp.width, hidden, mlp.bias),
            f"{prefix}up_proj": (mlp.width, hidden, mlp.bias),
            f"{prefix}down_proj": (hidden, mlp.width, mlp.bias),
        }
    )


def _mlp_params(prefix: str, mlp: Mlp, read: Read, put: Put, name: str = "") -> dict[str, jax.Array]:
    params: dict[str, jax.Array] = {}
    _linear(params, f"{name}gate_up", (f"{prefix}gate_proj", f"{prefix}up_proj"), read, put, mlp.bias)
    _linear(params, f"{name}down", (f"{prefix}down_proj",), read, put, mlp.bias)
    return params


def _experts_shapes(e: Experts, hidden: int) -> LayerShapes:
    shapes: LayerShapes = {"mlp.gate.weight": (e.count, hidden)}
    if e.sigmoid:
        shapes["mlp.gate.e_score_correction_bias"] = (e.count,)
    if e.joined:
        shapes["mlp.experts.gate_up_proj"] = (e.count, 2 * e.width, hidden)
        shapes["mlp.experts.down_proj"] = (e.count, hidden, e.width)
    else:
        for i in range(e.count):
            shapes |= _mlp_shapes(f"mlp.experts.{i}.", Mlp(e.width), hidden)
    if e.shared:
        shapes |= _mlp_shapes("mlp.shared_experts.", Mlp(e.shared), hidden)
    if e.shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _experts_params(e: Experts, read: Read, put: Put) -> dict[str, jax.Array]:
    exact = putter(jnp.float32)
    params = {"router": exact(read("mlp.gate.weight").T)}
    if e.sigmoid:
        params["router_bias"] = exact(read("mlp.gate.e_score_correction_bias"))
    if e.joined:
        params["experts_gate_up"] = put(read("mlp.experts.gate_up_proj").swapaxes(1, 2))
        params["experts_down"] = put(read("mlp.experts.down_proj").swapaxes(1, 2))
    else:  # one after the other: all of them in float32 would need much memory
        each = [_mlp_params(f"mlp.experts.{i}.", Mlp(e.width), read, put) for i in range(e.count)]
        params["experts_gate_up"] = jnp.stack([expert.pop("gate_up") for expert in each])
        params["experts_down"] = jnp.stack([expert.pop("down") for expert in each])
    if e.shared:
        params |= _mlp_params("mlp.shared_experts.", Mlp(e.shared), read, put, "shared_")
    if e.shared_gate:
        params["shared_gate"] = put(read("mlp.shared_expert_gate.weight").T)
    return params
