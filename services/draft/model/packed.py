"""Published quantized weights, made plain as they are read: the draft narrows them again if it is told to.

A linear layer's weight W [out, in] is stored as several tensors, named behind the layer's name. W = (stored value -
zero point) * scale, with a scale for every group of neighbouring inputs, every row, every block, or for all.

    fp8                 weight float8 [out, in]; weight_scale_inv [row blocks, column blocks] or one number
    compressed-tensors  weight_packed int32 [out, .], weight_shape; or weight int8 or float8; weight_scale
    gptq                qweight int32, packed along in; qzeros packed along out; scales [groups, out]; g_idx [in]
    awq                 qweight int32 [in, .], packed along out in its own order; qzeros alike; scales [groups, out]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError

Part = NDArray[Any]
Settings = Mapping[str, Any]

# What stands behind a layer's name: parts without a weight of their own, and those beside one.
INSTEAD = ("qweight", "weight_packed")
BESIDE = ("weight_scale_inv", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "scales",
          "g_idx", "input_scale", "weight_observer", "input_global_scale")  # fmt: skip

_WORD = 32  # bits
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where column i of eight lies in its word
_BLOCK = 128  # of fp8 checkpoints that do not say


def plain_shape(
    shapes: Mapping[str, tuple[int, ...]], weight_shape: Part | None, settings: Settings
) -> tuple[int, ...]:
    """The shape of a weight by those of its parts, without reading them. weight_shape: the part of that name."""
    if weight_shape is not None:
        return tuple(int(size) for size in weight_shape)
    rows, columns = shapes["qweight"]
    per_word = _WORD / _bits(settings)
    if _is_awq(settings):
        return round(columns * per_word), rows
    return columns, shapes["g_idx"][0] if "g_idx" in shapes else round(rows * per_word)


def plain(name: str, parts: Mapping[str, Part], settings: Settings) -> NDArray[np.float32]:
    """The weight [out, in]. settings: quantization_config of the checkpoint. Raises ConfigError for other layouts."""
    try:
        if "qweight" in parts:
            return _awq(parts, settings) if _is_awq(settings) else _gptq(parts, settings)
        return _scaled_weight(parts, settings)
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"the quantized tensors of {name} are not laid out as their format says: {error}") from None


def _is_awq(settings: Settings) -> bool:
    if settings.get("quant_method") != "awq":
        return False
    if str(settings.get("version", "gemm")).lower() != "gemm":
        raise ConfigError(f"AWQ in the version {settings['version']} cannot be read; expected gemm")
    return True


def _bits(settings: Settings) -> int:
    return int(settings.get("bits") or settings.get("w_bit") or 4)


def _words(words: Part, bits: int, count: int) -> NDArray[np.int32]:
    """Unsigned integers of some bits, packed densely from each word's lowest bit on.

    words: [rows, n] int32. Returns the first `count` of each row, [rows, count].
    """
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, count=count * bits, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.int32)
    return (stream.reshape(len(words), count, bits) * weights).sum(axis=-1, dtype=np.int32)


def _gptq(parts: Mapping[str, Part], settings: Settings) -> NDArray[np.float32]:
    """checkpoint_format: gptq stores zero points less one, gptq_v2 as they are."""
    bits = _bits(settings)
    less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    scales = parts["scales"].astype(np.float32)  # [groups, out]
    groups, outs = scales.shape
    ins = len(parts["g_idx"]) if "g_idx" in parts else len(parts["qweight"]) * _WORD // bits
    values = _words(parts["qweight"].T, bits, ins)  # [out, in]
    zeros = (_words(parts["qzeros"], bits, outs) + less) & ((1 << bits) - 1)
    group = parts["g_idx"] if "g_idx" in parts else np.arange(ins) * groups // ins
    return (values - zeros.T[:, group]) * scales.T[:, group]


def _awq(parts: Mapping[str, Part], settings: Settings) -> NDArray[np.float32]:
    bits = _bits(settings)

    def columns(words: Part) -> NDArray[np.int32]:
        values = _words(words, bits, words.shape[1] * _WORD // bits)
        eights = values.reshape(len(values), -1, len(_AWQ_ORDER))
        return eights[:, :, list(_AWQ_ORDER)].reshape(len(values), -1)

    values, zeros, scales = columns(parts["qweight"]), columns(parts["qzeros"]), parts["scales"].astype(np.float32)
    group = np.arange(len(values)) * len(scales) // len(values)
    return ((values - zeros[group]) * scales[group]).T


def _scaled_weight(parts: Mapping[str, Part], settings: Settings) -> NDArray[np.float32]:
    scale, zeros = parts.get("weight_scale", parts.get("weight_scale_inv")), parts.get("weight_zero_point")
    if scale is None:
        raise KeyError("weight_scale")
    if "weight_packed" in parts:
        outs, ins = (int(size) for size in parts["weight_shape"])
        bits = parts["weight_packed"].shape[1] * _WORD // ins
        offset = 1 << (bits - 1)
        values = (_words(parts["weight_packed"], bits, ins) - offset).astype(np.float32)
        if zeros is not None and zeros.dtype == np.int32:
            zeros = _words(zeros.T, bits, outs).T - offset
    else:
        values = parts["weight"].astype(np.float32)
    group = parts.get("weight_g_idx")
    if group is not None and group.min() >= 0:  # inputs in the order of their groups, not of their places
        scale = scale[:, group]
        zeros = zeros if zeros is None else zeros[:, group]
    block = _block(settings)
    if zeros is not None:
        values = values - _spread(zeros.astype(np.float32), values, block)
    return values * _spread(scale.astype(np.float32), values, block)


def _block(settings: Settings) -> tuple[int, int] | None:
    """Rows and columns that share a scale, where that is said."""
    said = settings.get("weight_block_size")
    for group in (settings.get("config_groups") or {}).values():
        said = said or (group.get("weights") or {}).get("block_structure")
    return None if said is None else (int(said[0]), int(said[1]))


def _spread(scale: Part, values: Part, block: tuple[int, int] | None) -> Part:
    """One number of `scale`, which is of any shape, for each of `values` [out, in], or for each of its rows."""
    if scale.size == 1:
        return scale.reshape(1, 1)
    scale = scale if scale.ndim == 2 else scale.reshape(-1, 1)
    for axis in (0, 1):
        size, blocks = values.shape[axis], scale.shape[axis]
        if blocks in (1, size):
            continue
        length = block[axis] if block else _BLOCK if -(-size // _BLOCK) == blocks else size // blocks
        if -(-size // length) != blocks:
            raise ValueError(f"{blocks} scales for {size} weights, which are not blocks of {length}")
        scale = np.take(np.repeat(scale, length, axis=axis), np.arange(size), axis=axis)
    return scale
