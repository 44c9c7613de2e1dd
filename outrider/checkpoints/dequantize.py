"""Dequantization: plain weights from the tensors of published quantized formats.

Each format stores a linear layer's weight W [out, in] as several tensors, named after the layer. In all formats
W = (stored value - zero point) * scale, with one scale for each group of neighbouring inputs, each row, each block, or
the whole weight; the formats differ in the packing of integers.

    fp8                 weight float8 [out, in]; weight_scale_inv [row blocks, column blocks] or one number
    gptq                qweight int32, packed along in; qzeros packed along out; scales [groups, out]; g_idx [in]
    awq                 qweight int32 [in, .], packed along out in its own order; qzeros alike; scales [groups, out]
    compressed-tensors  weight_packed int32 [out, .], weight_shape; or weight int8 or float8; weight_scale
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError

Array = NDArray[Any]
Settings = Mapping[str, Any]  # quantization_config of a checkpoint

# Suffixes after a layer's name: tensors that replace its weight, and tensors beside a weight.
INSTEAD = ("qweight", "weight_packed")
BESIDE = ("weight_scale_inv", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "scales",
          "g_idx", "input_scale", "input_zero_point", "activation_scale", "weight_observer",
          "input_global_scale")  # fmt: skip

_WORD = 32  # bits
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of the 8 values in a word, from its lowest bits on
_GPTQ_BITS = (4, 8, 2, 3, 5, 6, 7, 16)
_BLOCK = (128, 128)  # default block of fp8 checkpoints
_CHUNK = 1 << 19  # numbers computed at once, so that inputs and outputs fit into a core's cache
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
_IN_WEIGHTS = ("weight_input", "weight_output")  # locations of transforms (SpinQuant, QuIP) that the weights include


def check_layout(settings: Settings) -> None:
    """Raise ConfigError for variants of a format that `dequantize` does not support."""
    method = settings.get("quant_method")
    if method == "awq" and str(settings.get("version", "gemm")).lower() != "gemm":
        raise ConfigError(f"AWQ weights of version {settings['version']} are not supported; only GEMM is")
    if method == "awq" and _bits(settings) != 4:
        raise ConfigError(f"AWQ weights of {_bits(settings)} bits are not supported; only 4 bits are")
    if method == "gptq" and str(settings.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        raise ConfigError(f"GPTQ weights in the format {settings['checkpoint_format']} are not supported")
    if method == "compressed-tensors":
        groups = (settings.get("config_groups") or {}).values()
        layouts = {str(group.get("format") or settings.get("format") or "dense") for group in groups}
        unsupported = sorted(layouts - set(_COMPRESSED))
        if unsupported or (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
            name = ", ".join(unsupported) or "a sparse layout"
            raise ConfigError(f"compressed-tensors weights as {name} are not supported")
        if places := _transformed(settings):
            raise ConfigError(f"weights that need transforms of {', '.join(places)} at run time are not supported")


def _transformed(settings: Settings) -> list[str]:
    """Locations that compressed-tensors transforms at run time."""
    schemes = ((settings.get("transform_config") or {}).get("config_groups") or {}).values()
    places = {str(part.get("location")) for scheme in schemes for part in scheme.get("apply") or ()}
    return sorted(places - set(_IN_WEIGHTS))


def plain_shape(
    shapes: Mapping[str, tuple[int, ...]], weight_shape: Array | None, settings: Settings
) -> tuple[int, ...]:
    """The shape of a weight, from the shapes of its tensors. weight_shape: content of the tensor of that name, or None.

    Raises ConfigError for unsupported layouts.
    """
    check_layout(settings)
    if weight_shape is not None:
        return tuple(int(size) for size in weight_shape)
    rows, columns = shapes["qweight"]
    if settings.get("quant_method") == "awq":
        return columns * _WORD // _bits(settings), rows
    return columns, shapes["g_idx"][0] if "g_idx" in shapes else rows * _WORD // _gptq_bits(shapes, settings)


def dequantize(name: str, tensors: Mapping[str, Array], settings: Settings) -> NDArray[np.float32]:
    """The weight [out, in] of a layer, computed on all cores of this process.

    name: of the layer, for messages. tensors: by their suffix after the layer's name. Raises ConfigError for tensors
    that do not have the layout of their format, and for unsupported layouts.
    """
    try:
        return _computed(stored_weight(tensors, settings))
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ConfigError(f"the quantized tensors of {name} do not have the layout of their format: {error}") from None


def stored_weight(tensors: Mapping[str, Array], settings: Settings) -> Quantized:
    """A quantized weight as its tensors have it. Arguments as of `dequantize`; wrong layouts raise various errors."""
    check_layout(settings)
    if "qweight" in tensors:
        read = _awq if settings.get("quant_method") == "awq" else _gptq
    else:
        read = _packed if "weight_packed" in tensors else _scaled
    return read(tensors, settings)


@dataclass(frozen=True)
class Quantized:
    """A quantized weight: (value - zero) * scale.

    scales, zeros: float32 [1, out or blocks of out; 1, in or blocks of in]. bits: of its integers; 0 for float8
    """

    shape: tuple[int, int]
    bits: int
    values: Callable[[slice], Array]  # the stored values [rows, in] of a slice that starts at a multiple of 32
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32] | None
    block: tuple[int | None, int | None]  # rows and columns that share a scale; None if the settings do not set them
    order: Array | None = None  # column of `scales` for each input, if groups are not contiguous

    @property
    def outputs_of_scale(self) -> int:
        """Neighbouring outputs that share a scale; those of the last block may be fewer."""
        return _length(self.shape[0], len(self.scales), self.block[0])

    @property
    def group(self) -> int:
        """Neighbouring inputs that share a scale; those of the last group may be fewer. Not with an `order`."""
        return _length(self.shape[1], self.scales.shape[1], self.block[1])


def _gptq(tensors: Mapping[str, Array], settings: Settings) -> Quantized:
    """checkpoint_format gptq stores zero points minus one, gptq_v2 stores them unchanged."""
    bits = _gptq_bits({name: tensor.shape for name, tensor in tensors.items()}, settings)
    packed, scales = tensors["qweight"], tensors["scales"]
    order, outs = tensors.get("g_idx"), packed.shape[1]
    ins = len(packed) * _WORD // bits if order is None else len(order)
    if order is not None and np.array_equal(order, np.arange(ins) * len(scales) // ins):
        order = None
    less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    zeros = (_unpack(tensors["qzeros"], bits, outs).astype(np.int32) + less) & ((1 << bits) - 1)

    def values(rows: slice) -> Array:
        return _unpack(packed[:, rows].T, bits, ins)

    scales = _table(scales.T)
    return Quantized((outs, ins), bits, values, scales, _table(zeros.T), (1, _group(settings, ins, scales)), order)


def _awq(tensors: Mapping[str, Array], settings: Settings) -> Quantized:
    bits, packed, scales = _bits(settings), tensors["qweight"], tensors["scales"]
    ins, outs = len(packed), packed.shape[1] * _WORD // bits
    zeros = _unpack(tensors["qzeros"], bits, outs, _AWQ_ORDER)

    def values(rows: slice) -> Array:
        words = packed[:, rows.start * bits // _WORD : -(-rows.stop * bits // _WORD)]
        return _unpack(words, bits, rows.stop - rows.start, _AWQ_ORDER).T

    scales = _table(scales.T)
    return Quantized((outs, ins), bits, values, scales, _table(zeros.T), (1, _group(settings, ins, scales)))


def _scaled(tensors: Mapping[str, Array], settings: Settings) -> Quantized:
    """fp8, and compressed-tensors whose weight is not packed."""
    weight, zeros = tensors["weight"], tensors.get("weight_zero_point")
    scales, block = tensors.get("weight_scale_inv"), _block(settings)
    if scales is None:
        scales = tensors["weight_scale"]
    elif block == (None, None):
        block = _BLOCK
    if scales.dtype == np.uint8:
        scales = np.exp2(scales.astype(np.float32) - 127)  # exponents of two
    outs, ins = weight.shape
    zeros, scales = None if zeros is None else _table(zeros), _table(scales)
    if block == (None, None):
        block = (None, _group(settings, ins, scales))
    bits = 8 if weight.dtype == np.int8 else 0
    return Quantized((outs, ins), bits, weight.__getitem__, scales, zeros, block, _order(tensors))


def _packed(tensors: Mapping[str, Array], settings: Settings) -> Quantized:
    """compressed-tensors with packed weights: signed integers, stored with half the unsigned range added."""
    packed, zeros = tensors["weight_packed"], tensors.get("weight_zero_point")
    outs, ins = (int(size) for size in tensors["weight_shape"])
    bits = packed.shape[1] * _WORD // ins
    middle = np.full((1, 1), 1 << (bits - 1))
    if zeros is None:
        zeros = middle
    elif zeros.dtype == np.int32:
        zeros = _unpack(zeros.T, bits, outs).T
    else:
        zeros = zeros + middle

    def values(rows: slice) -> Array:
        return _unpack(packed[rows], bits, ins)

    scales = _table(tensors["weight_scale"])
    group = _group(settings, ins, scales)
    block = _block(settings) if group is None else (None, group)
    return Quantized((outs, ins), bits, values, scales, _table(zeros), block, _order(tensors))


def _order(tensors: Mapping[str, Array]) -> Array | None:
    order = tensors.get("weight_g_idx")
    return None if order is None or order.min() < 0 else order  # -1 everywhere: contiguous groups


def _gptq_bits(shapes: Mapping[str, tuple[int, ...]], settings: Settings) -> int:
    """Bits of a layer, from its tensors: they may differ from the checkpoint's setting (GPTQModel's `dynamic`)."""
    rows, outs = shapes["qweight"]
    groups, zeros = shapes["qzeros"]
    size = int(settings.get("group_size") or -1)

    def fits(bits: int) -> bool:
        ins = rows * _WORD // bits
        as_many = shapes["g_idx"][0] == ins if "g_idx" in shapes else size <= 0 or -(-ins // size) == groups
        return -(-outs * bits // _WORD) == zeros and as_many

    default = _bits(settings)
    return next((bits for bits in (default, *_GPTQ_BITS) if fits(bits)), default)


def _bits(settings: Settings) -> int:
    return int(settings.get("bits") or settings.get("w_bit") or 4)


def _block(settings: Settings) -> tuple[int | None, int | None]:
    block = settings.get("weight_block_size")
    for group in (settings.get("config_groups") or {}).values():
        block = block or (group.get("weights") or {}).get("block_structure")
    return (int(block[0]), int(block[1])) if block else (None, None)


def _group(settings: Settings, ins: int, scales: Array) -> int | None:
    """Number of contiguous inputs that share a scale, fewer in the last group; None if no size in the settings fits."""
    weights = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    given = (settings.get("group_size"), settings.get("q_group_size"), *(each.get("group_size") for each in weights))
    sizes = (int(size) for size in given if size is not None and int(size) > 0)
    return next((size for size in sizes if -(-ins // size) == scales.shape[1]), None)


def _table(numbers: Array) -> NDArray[np.float32]:
    """Scales or zero points as [blocks of out, blocks of in]."""
    return numbers.reshape(numbers.shape if numbers.ndim == 2 else (-1, 1)).astype(np.float32)


def _unpack(words: Array, bits: int, count: int, order: Sequence[int] | None = None) -> Array:
    """Unpack unsigned integers of `bits` bits, packed densely from each word's lowest bit on.

    words: [rows, n] int32. order: columns of the integers of a word, if they are not in order. Returns the first
    `count` integers of each row, [rows, count] uint8 or uint32.
    """
    wide = math.lcm(bits, _WORD) // _WORD  # words after which an integer starts at a word boundary again
    period = wide * _WORD // bits
    missing = -words.shape[1] % wide
    words = np.ascontiguousarray(np.pad(words, ((0, 0), (0, missing))) if missing else words).view(np.uint32)
    values = np.empty((len(words), words.shape[1] // wide * period), np.uint8 if bits <= 8 else np.uint32)
    for place, column in enumerate(order or range(period)):
        word, shift = divmod(place * bits, _WORD)
        number = words[:, word::wide] >> np.uint32(shift)
        if shift + bits > _WORD:
            number |= words[:, word + 1 :: wide] << np.uint32(_WORD - shift)
        values[:, column::period] = number & np.uint32((1 << bits) - 1)
    return values[:, :count]


def _computed(weight: Quantized) -> NDArray[np.float32]:
    outs, ins = weight.shape
    result = np.empty((outs, ins), np.float32)
    step = max(1, _CHUNK // ins // _WORD) * _WORD

    def compute(first: int) -> None:
        rows = slice(first, min(first + step, outs))
        chunk = result[rows]
        chunk[:] = weight.values(rows)
        for operation, table in ((np.subtract, weight.zeros), (np.multiply, weight.scales)):
            if table is not None:
                numbers = _spread(table, rows, weight)
                groups = chunk.reshape(len(chunk), numbers.shape[1], -1)
                operation(groups, numbers[:, :, None], out=groups)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(compute, range(0, outs, step)))
    return result


def _spread(table: NDArray[np.float32], rows: slice, weight: Quantized) -> NDArray[np.float32]:
    """The numbers of `table` for some rows of a weight: [rows, groups of equally many contiguous inputs]."""
    (outs, ins), blocks = weight.shape, table.shape[1]
    table = table[np.arange(rows.start, rows.stop) // _length(outs, len(table), weight.block[0])]
    if weight.order is not None and blocks > 1:
        return table[:, weight.order]
    length = _length(ins, blocks, weight.block[1])
    return table if length * blocks == ins else table[:, np.arange(ins) // length]


def _length(size: int, blocks: int, given: int | None) -> int:
    """Number of rows or columns that share a number of a table. Raises ValueError for one that does not fit."""
    if blocks in (1, size):
        return size // blocks
    length = given or size // blocks
    if -(-size // length) != blocks:
        raise ValueError(f"{blocks} scales for {size} weights do not match blocks of {length}")
    return length
