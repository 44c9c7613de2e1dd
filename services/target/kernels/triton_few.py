"""Products of a few rows with a large matrix on CUDA: the time in which the matrix is read.

The libraries behind PyTorch cut a sum among programs and add it up in another launch, and choose both by the number of
rows. Here a program reads whole rows of the matrix, each once for all rows of the step, some blocks ahead; a row's bits
are the same whether 1 or 16 are computed together.
"""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.target.kernels.triton_attention import interpreted
from services.target.kernels.triton_rows import activated

ROWS = 16
"""Most rows of a product."""
_INPUTS = 256  # that a program reads of each of its outputs at a time
_FORMATS = (torch.bfloat16, torch.float16)
_LEAST_OUTPUTS = 2048  # that make programs enough for a GPU, 16 outputs each


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, y, rows, outputs, inputs, x_row, w_row, y_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """GATED: the weight holds gates and, `outputs` rows on, their values."""
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.arange(0, INPUTS)
    x_rows = x + row[:, None] * x_row
    own = weight + tl.minimum(output, outputs - 1).to(tl.int64)[None, :] * w_row
    beside = own + outputs.to(tl.int64) * w_row
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    values = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in tl.range(0, inputs, INPUTS):
        at = begin + part
        live = (row < rows)[:, None]
        if EVEN:
            right = tl.load(own + at[:, None])
        else:
            live = live & (at < inputs)[None, :]
            right = tl.load(own + at[:, None], mask=(at < inputs)[:, None], other=0.0)
        left = tl.load(x_rows + at[None, :], mask=live, other=0.0)
        if WIDE:
            total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(left, right, total)
        if GATED:
            if EVEN:
                third = tl.load(beside + at[:, None])
            else:
                third = tl.load(beside + at[:, None], mask=(at < inputs)[:, None], other=0.0)
            if WIDE:
                values = tl.dot(left.to(tl.float32), third.to(tl.float32), values, input_precision="ieee")
            else:
                values = tl.dot(left, third, values)
    rounded = y.dtype.element_ty
    if GATED:
        opened = activated(total.to(rounded).to(tl.float32), GELU).to(rounded).to(tl.float32)
        total = opened * values.to(rounded).to(tl.float32)
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    there = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(y + row[:, None] * y_row + output[None, :], total.to(rounded), mask=there)


def serves(x: Tensor, weight: Tensor) -> bool:
    """True if the kernel is the faster one, by what was measured. x: [T, inputs]; weight: [outputs, inputs]."""
    return 0 < len(x) <= ROWS and x.dtype in _FORMATS and weight.shape[0] >= _LEAST_OUTPUTS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias. x: [T, inputs], at most ROWS rows; weight: [outputs, inputs]; bias: [outputs]. [T, outputs]."""
    return _launch(x, weight, bias, weight.shape[0], gated=False, gelu=False)


def gated(x: Tensor, weight: Tensor, *, gelu: bool = False) -> Tensor:
    """activation(x G^T) * (x V^T). x: as of `linear`; weight: [2 * width, inputs], G above V. Returns [T, width]."""
    return _launch(x, weight, None, weight.shape[0] // 2, gated=True, gelu=gelu)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, *, gated: bool, gelu: bool) -> Tensor:
    assert len(x) <= ROWS, "a program holds them all"
    assert x.stride(1) == weight.stride(1) == 1, "a row's numbers lie together"
    rows, inputs = x.shape
    y = x.new_empty(rows, outputs)
    wide = weight.shape[0] >= 2 * _LEAST_OUTPUTS
    _few_rows[(triton.cdiv(outputs, 32 if wide else 16),)](
        x, weight, x if bias is None else bias, y, rows, outputs, inputs, x.stride(0), weight.stride(0), y.stride(0),
        ROWS=ROWS, OUTPUTS=32 if wide else 16, INPUTS=_INPUTS, EVEN=inputs % _INPUTS == 0, BIAS=bias is not None,
        GATED=gated, GELU=gelu, WIDE=interpreted(), num_warps=4, num_stages=3 if gated else 4,
    )  # fmt: skip
    return y
