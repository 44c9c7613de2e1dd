"""Numbers of published quantized checkpoints (GPTQ, AWQ, compressed-tensors, FP8) in number formats of the kernels.

    8 bits, one scale a row                INT8
    8 bits in groups, symmetric            SYMMETRIC8
    4 bits, zero point 8                   SYMMETRIC4
    4 bits with zero points                K4, in groups of 64 inputs or a multiple; AFFINE4 in groups of 32
    float8 (E4M3)                          FLOAT8, with a scale for all, a row, or blocks of 64 inputs or a multiple

They are held without loss: scales must be half-precision numbers, but for INT8 and FLOAT8, and groups whole blocks of
the kernels. Other weights are widened.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.checkpoints.dequantize import Quantized
from services.target.kernels.cpu.matrices.weights import BLOCK, GROUP, Format, PackedWeight
from services.target.model.stored.source import StoredFormat, parts_of

_WORD = 32  # rows: values are read from multiples of it on
_MIDDLE = 8  # zero point of symmetric 4-bit weights
_LARGEST_SCALE = 2.0**100  # of FLOAT8; the kernels multiply it by 256


class _Tables(NamedTuple):
    """scales, zeros: float32 [1 or out, 1 or groups]. zeros: None for signed values."""

    scales: NDArray[np.float32]
    zeros: NDArray[np.float32] | None


def how_held(weight: Quantized) -> StoredFormat | None:
    """The format that holds a weight exactly; None if there is none."""
    if weight.bits == 0:
        return _how_floats_are_held(weight)
    (outs, _), tables = weight.shape, _Tables(weight.scales, weight.zeros)
    rows = {len(table) for table in tables if table is not None}
    if weight.bits not in (4, 8) or weight.order is not None or not rows <= {1, outs}:
        return None
    one, group = weight.scales.shape[1] == 1, weight.group
    if weight.zeros is not None and weight.zeros.shape[1] not in (1, weight.scales.shape[1]):
        return None
    zero = _only(weight.zeros)
    if weight.bits == 8:
        if zero != (0.0 if weight.zeros is None else 128.0):
            return None
        if one:
            return StoredFormat(Format.INT8)
        return StoredFormat(Format.SYMMETRIC8) if group % BLOCK == 0 and _half(weight.scales) else None
    if weight.zeros is None or not _half(weight.scales) or not (one or group % BLOCK == 0):
        return None
    if zero == _MIDDLE:
        return StoredFormat(Format.SYMMETRIC4)
    if one or group % GROUP == 0:
        return StoredFormat(Format.K4) if one else StoredFormat(Format.K4, group // GROUP)
    return StoredFormat(Format.AFFINE4) if _half(-weight.scales * weight.zeros) else None


def _how_floats_are_held(weight: Quantized) -> StoredFormat | None:
    if weight.values(slice(0, 0)).dtype != np.uint8 or weight.zeros is not None or weight.order is not None:
        return None  # of another format than E4M3, whose bytes are read
    try:
        outputs, inputs = weight.outputs_of_scale, weight.group
    except (ValueError, ZeroDivisionError):
        return None  # widening reports it
    whole = weight.scales.shape[1] == 1 or inputs % GROUP == 0
    if not (outputs and inputs and whole and (np.abs(weight.scales) < _LARGEST_SCALE).all()):  # NaN is not less
        return None
    return StoredFormat(Format.FLOAT8, -(-inputs // GROUP))


def pack_held(weight: Quantized, how: StoredFormat, packed: PackedWeight, outputs: Tensor) -> None:
    """Pack a weight in the format that holds it. outputs: [n] int64, indices of its rows in the packed weight.

    Raises ValueError for floats that are no numbers.
    """
    if how.number_format == Format.FLOAT8:
        _pack_floats(weight, packed, outputs)
        return
    outs, ins = weight.shape
    for begin, end in parts_of(outs, ins, _WORD):
        rows = slice(begin, end)
        values = weight.values(rows)
        if weight.zeros is None:  # signed
            values = values.astype(np.int16) + 128
        unsigned = torch.from_numpy(np.ascontiguousarray(values).astype(np.uint8))
        _fill(packed, outputs[begin:end], unsigned, weight, rows, how)


def _pack_floats(weight: Quantized, packed: PackedWeight, outputs: Tensor) -> None:
    for begin, end in parts_of(*weight.shape):
        codes = weight.values(slice(begin, end))
        if ((codes & 0x7F) == 0x7F).any():
            raise ValueError("has entries that are not numbers (NaN)")
        scales = weight.scales[np.arange(begin, end) // weight.outputs_of_scale]
        packed.fill_blocks(outputs[begin:end], torch.from_numpy(codes), scale_units=torch.from_numpy(scales))


def _fill(
    packed: PackedWeight, outputs: Tensor, values: Tensor, weight: Quantized, rows: slice, how: StoredFormat
) -> None:
    scales = _of_rows(weight.scales, rows)
    zeros = None if weight.zeros is None else _of_rows(weight.zeros, rows)
    if how.number_format == Format.INT8:
        packed.fill_quantized(outputs, (values.to(torch.int16) - 128).to(torch.int8), scales[:, 0].contiguous())
        return
    blocks = _spread(scales, packed.inputs, weight, BLOCK)
    if how.number_format == Format.K4:
        assert zeros is not None, "only weights with zero points are held so"
        minima = _spread(zeros, packed.inputs, weight, BLOCK).to(torch.uint8)
        units = _spread(scales, packed.inputs, weight, GROUP * how.groups).half()
        packed.fill_blocks(outputs, values, torch.ones_like(minima), minima, units, -units)
    elif how.number_format == Format.AFFINE4:
        assert zeros is not None, "only weights with zero points are held so"
        packed.fill_blocks(
            outputs, values, blocks.half(), (-blocks * _spread(zeros, packed.inputs, weight, BLOCK)).half()
        )
    else:
        packed.fill_blocks(outputs, values, blocks.half())


def _only(table: NDArray[np.float32] | None) -> float | None:
    """The number that a table repeats; 0 without a table, None for several numbers."""
    if table is None:
        return 0.0
    first = float(table.flat[0])
    return first if bool((table == first).all()) else None


def _half(numbers: NDArray[Any]) -> bool:
    with np.errstate(over="ignore"):
        return bool((numbers.astype(np.float16).astype(np.float32) == numbers).all())


def _of_rows(table: NDArray[np.float32], rows: slice) -> Tensor:
    """Numbers of some rows, [n, 1 or groups]."""
    count = rows.stop - rows.start
    return torch.from_numpy(np.ascontiguousarray(np.repeat(table, count, 0) if len(table) == 1 else table[rows]))


def _spread(numbers: Tensor, inputs: int, weight: Quantized, block: int) -> Tensor:
    """Numbers of groups as numbers of blocks, [n, blocks]; a block lies within one group."""
    if numbers.shape[1] == 1:
        return numbers.expand(-1, -(-inputs // block)).contiguous()
    return numbers[:, torch.arange(0, inputs, block) // weight.group].contiguous()
