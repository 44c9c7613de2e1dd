"""Batch-invariant products and elementwise functions: a result's bits do not depend on its place or its neighbours.

PyTorch's products choose their algorithm by the number of rows, and its functions compute the last numbers of an array
with other code than the rest.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable

import torch
from torch import Tensor

from services.target.kernels.cpu import library
from services.target.kernels.cpu.pool import shared_pool

_DTYPES = (torch.float32, torch.bfloat16)
# Numbers that PyTorch computes on one thread for every function, a multiple of the vector length.
_PIECE, _VECTOR = 2048, 64


class Function(enum.IntEnum):
    """Functions that are compiled, as in csrc/matrices/invariant_product.h."""

    SIGMOID = 0
    SILU = 1
    GELU_TANH = 2


def product(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, which: Tensor) -> Tensor:
    """Products of groups of adjacent rows with one matrix a group.

    x: [P, inputs]; weight: [matrices, outputs, inputs], of x's dtype, either dimension contiguous; bias: [matrices,
    outputs]; first: [groups + 1] int64, first row of each group; which: [groups] int64, its matrix. Returns
    [P, outputs].
    """
    assert x.dtype in _DTYPES, "products are computed in float32 or bfloat16"
    assert weight.dtype == x.dtype, "both factors have one format"
    x = x.contiguous()
    if weight.stride(2) != 1 and weight.stride(1) != 1:
        weight = weight.contiguous()
    by_inputs = weight.stride(2) != 1
    wide_bias = None if bias is None else bias.float().contiguous()
    outputs = weight.shape[1]
    y = x.new_empty(x.shape[0], outputs)
    if not y.numel():
        return y
    call = library.Product(
        first.data_ptr(), which.data_ptr(), len(which), x.shape[1], outputs, x.data_ptr(), weight.data_ptr(),
        weight.stride(0), weight.stride(2 if by_inputs else 1), by_inputs, x.dtype == torch.bfloat16,
        None if wide_bias is None else wide_bias.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    library.load().outrider_product(shared_pool().handle, ctypes.byref(call))
    return y


def apply(function: Function, x: Tensor) -> Tensor:
    """Apply a compiled function elementwise. x: float32 or bfloat16."""
    x = x.contiguous()
    y = torch.empty_like(x)
    library.load().outrider_apply(
        shared_pool().handle, function, x.data_ptr(), y.data_ptr(), x.numel(), x.dtype == torch.bfloat16
    )
    return y


def in_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply one of PyTorch's elementwise functions in padded pieces, so that it sees whole vectors only."""
    flat = x.reshape(-1)
    count = flat.numel()
    padded = torch.nn.functional.pad(flat, (0, -count % _VECTOR))
    parts = [function(piece) for piece in padded.split(_PIECE)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count].view(x.shape)
