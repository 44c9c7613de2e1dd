"""Batch-invariant matrix products and row sums on CUDA: fixed tiles, every sum in a fixed order.

PyTorch's libraries choose tiles, and whether to split a sum, by the number of rows; here the number format alone
decides, so a row's bits depend on the row alone. One kernel serves linear layers, batched matrices and experts.

    tile   up to ROWS adjacent rows of a group, which share a matrix
"""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.target.kernels.cuda.attention import interpreted


@dataclass(frozen=True)
class Shape:
    """Rows, outputs and inputs of a program's tile; warps and pipeline stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


_NARROW = Shape(64, 64, 64, 4, 4)
_WIDE = Shape(32, 32, 32, 4, 2)  # float32 products are exact and do not use the tensor cores
_SUMMED = 1024  # numbers of a row in one step of a sum


@triton.jit(do_not_specialize=["each"])
def _product(
    x, weight, bias, y, tile_group, tile_row, group_end, each, outputs, inputs,
    x_row, matrix, w_output, w_input, bias_row, y_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    TABLES: tl.constexpr,
):  # fmt: skip
    """TABLES: groups of any size, with tables of their tiles; otherwise each group has `each` rows."""
    tile = tl.program_id(0)
    if TABLES:
        group = tl.load(tile_group + tile)
        if group < 0:
            return
        first = tl.load(tile_row + tile)
        end = tl.load(group_end + group)
    else:
        tiles = tl.cdiv(each, ROWS)
        group = (tile // tiles).to(tl.int64)
        first = group * each + tile % tiles * ROWS
        end = (group + 1) * each
    row = first + tl.arange(0, ROWS).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.arange(0, INPUTS)
    own = weight + group.to(tl.int64) * matrix
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in tl.range(0, inputs, INPUTS):
        at = begin + part
        left = tl.load(
            x + row[:, None] * x_row + at[None, :], mask=(row < end)[:, None] & (at < inputs)[None, :], other=0.0
        )
        right = tl.load(
            own + at[:, None].to(tl.int64) * w_input + output[None, :].to(tl.int64) * w_output,
            mask=(at < inputs)[:, None] & (output < outputs)[None, :], other=0.0,
        )  # fmt: skip
        if WIDE:
            total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + group * bias_row + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + row[:, None] * y_row + output[None, :],
        total.to(y.dtype.element_ty),
        mask=(row < end)[:, None] & (output < outputs)[None, :],
    )


@triton.jit
def _sum(x, y, width, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(y + row, (tl.sum(total, 0) / scale).to(y.dtype.element_ty))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Products of equal groups of adjacent rows. x: [P, inputs]; weight: [groups, outputs, inputs], any strides.

    bias: [groups, outputs]. Returns [P, outputs].
    """
    each = x.shape[0] // groups
    return _launch(x, weight, bias, None, each, groups * -(-each // _shape(x).rows))


def grouped(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Products of the first counts[0] rows with the first matrix, of the next counts[1] with the second, and so on.

    counts: [groups] int64, on the device. The host does not wait for it: it launches the largest possible number of
    tiles.
    """
    height = _shape(x).rows
    most = -(-x.shape[0] // height) + min(len(counts), x.shape[0])
    end = counts.cumsum(0)
    last_tile = ((counts + height - 1) // height).cumsum(0)
    tile = torch.arange(most, device=x.device)
    group = torch.searchsorted(last_tile, tile, right=True)
    known = group.clamp(max=len(counts) - 1)
    before = last_tile - (counts + height - 1) // height
    row = (end - counts)[known] + (tile - before[known]) * height
    return _launch(x, weight, bias, (torch.where(group < len(counts), group, -1), row, end), 0, most)


def row_sums(x: Tensor, scale: float) -> Tensor:
    """Sums over the last dimension, divided by `scale`. x: [..., width]. Returns [...]."""
    x = x.contiguous()
    y = x.new_empty(x.shape[:-1])
    if y.numel():
        _sum[(y.numel(),)](x, y, x.shape[-1], scale, BLOCK=_SUMMED, num_warps=4, enable_fp_fusion=False)
    return y


def _shape(x: Tensor) -> Shape:
    return _WIDE if x.element_size() > 2 else _NARROW


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, tables: tuple[Tensor, Tensor, Tensor] | None, each: int, tiles: int
) -> Tensor:
    """tables: group of each tile (-1: none), its first row, and the end of each group; None: groups of `each` rows.

    The tables are computed on the device inside the captured graph, so that a replay never reads freed memory.
    """
    x = x.contiguous()
    outputs, inputs = weight.shape[1:]
    y = x.new_empty(x.shape[0], outputs)
    if not y.numel():
        return y
    shape = _shape(x)
    _product[(tiles, -(-outputs // shape.outputs))](
        x, weight, x if bias is None else bias, y, *(tables or (x, x, x)), each, outputs, inputs,
        x.stride(0), weight.stride(0), weight.stride(1), weight.stride(2), 0 if bias is None else bias.stride(0),
        y.stride(0),
        ROWS=shape.rows, OUTPUTS=shape.outputs, INPUTS=shape.inputs, BIAS=bias is not None,
        WIDE=interpreted() and x.dtype == torch.bfloat16, TABLES=tables is not None,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y
