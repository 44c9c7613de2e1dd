"""Weights of a checkpoint: every tensor that the decoder needs, by name and shape, and none besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (NumPy learns bfloat16)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from outrider.checkpoint import weight_files
from outrider.errors import ConfigError
from services.draft.model.config import ModelConfig

# embed [V, H] (absent where the head is tied), head [H, V], norm [H], layers: one dict a layer.
# A layer's matrices are [in, out]: XLA's CPU matrix products over a few rows run a fifth faster than from [out, in].
Params = dict[str, Any]

_HEAD = "lm_head.weight"
_ACCEPTED = {"BF16", "F16", "F32"}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, as name and shape."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_head:
        shapes[_HEAD] = (vocab, hidden)
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.heads * dim, config.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    projections = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


def load_params(folder: Path, config: ModelConfig, dtype: Any) -> Params:
    """Load a checkpoint's weights onto the device. Raises ConfigError naming the tensor that does not fit."""
    with ExitStack() as stack:
        files = [_open(stack, file) for file in weight_files(folder)]
        index = {name: file for file in files for name in file.keys()}  # noqa: SIM118  (safe_open is no mapping)
        shapes = expected_shapes(config)
        _check_names(folder, set(index), set(shapes), config)

        def read(name: str) -> NDArray[Any]:
            return _read(index[name], name, shapes[name])

        return _assemble(read, config, dtype)


def _open(stack: ExitStack, file: Path) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="numpy"))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is no readable safetensors file: {error}") from None


def _check_names(folder: Path, found: set[str], expected: set[str], config: ModelConfig) -> None:
    missing = sorted(expected - found)
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} tensors of a {config.architecture}: {_some(missing)}")
    # Old exports carry the rotary constants, and the head again where it is tied.
    ignored = {_HEAD} if config.tied_head else set()
    extra = sorted(name for name in found - expected - ignored if not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise ConfigError(
            f"{folder} has {len(extra)} tensors that a {config.architecture} does not know: {_some(extra)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _read(file: Any, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    part = file.get_slice(name)
    if tuple(part.get_shape()) != shape:
        raise ConfigError(f"tensor {name} has shape {list(part.get_shape())}; config.json expects {list(shape)}")
    if part.get_dtype() not in _ACCEPTED:
        raise ConfigError(f"tensor {name} has number format {part.get_dtype()}; expected one of {sorted(_ACCEPTED)}")
    tensor: NDArray[Any] = file.get_tensor(name)
    return tensor


def _assemble(read: Callable[[str], NDArray[Any]], config: ModelConfig, dtype: Any) -> Params:
    def put(array: NDArray[Any]) -> jax.Array:
        return jnp.array(np.ascontiguousarray(array.astype(np.float32)), dtype=dtype)

    embed = read("model.embed_tokens.weight")
    params: Params = {"norm": put(read("model.norm.weight"))}
    if config.tied_head:
        params["head"] = put(embed.T)
    else:
        params["embed"] = put(embed)
        params["head"] = put(read(_HEAD).T)
    params["layers"] = [
        {name: put(array) for name, array in _layer(read, f"model.layers.{layer}.", config)}
        for layer in range(config.layers)
    ]
    return params


def _layer(read: Callable[[str], NDArray[Any]], prefix: str, config: ModelConfig) -> Iterator[tuple[str, NDArray[Any]]]:
    def fused(names: tuple[str, ...], kind: str) -> NDArray[Any]:
        return np.concatenate([read(f"{prefix}{name}.{kind}") for name in names])

    groups = {
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
        "output": (("self_attn.o_proj",), config.output_bias),
        "gate_up": (("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        "down": (("mlp.down_proj",), config.mlp_bias),
    }
    for name, (projections, bias) in groups.items():
        yield name, fused(projections, "weight").T
        if bias:
            yield f"{name}_bias", fused(projections, "bias")
    yield "attention_norm", read(f"{prefix}input_layernorm.weight")
    yield "mlp_norm", read(f"{prefix}post_attention_layernorm.weight")
    if config.qk_norm:
        yield "q_norm", read(f"{prefix}self_attn.q_norm.weight")
        yield "k_norm", read(f"{prefix}self_attn.k_norm.weight")
