"""Weights of linear layers, laid out for the kernels; quantized on the way where asked for.

int8: symmetric, a scale an output. int4: symmetric, a scale for each 64 inputs of an output. Activations are then
quantized to 8 bits as they come, with a scale for each 64 of a row.
"""

from __future__ import annotations

import enum
import weakref

import torch
from torch import Tensor

from services.target.kernels.cpu import library

GROUP = 64
_CLIPPINGS = (1.0, 0.95, 0.9, 0.85, 0.8)


class Format(enum.IntEnum):
    """Number formats of weights, as in csrc/weight.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


class PackedWeight:
    """A weight in the kernels' memory. handle: its address."""

    def __init__(self, outputs: int, inputs: int, number_format: Format) -> None:
        functions = library.load()
        self.outputs, self.inputs, self.format = outputs, inputs, number_format
        self.handle: int = functions.outrider_weight_new(number_format, outputs, inputs)
        weakref.finalize(self, functions.outrider_weight_free, self.handle)

    @property
    def bytes(self) -> int:
        """What a step reads of it."""
        return int(library.load().outrider_weight_bytes(self.handle))

    def fill(self, outputs: Tensor, weight: Tensor) -> None:
        """Lay out some of the outputs. outputs: [n] int64, which; weight: [n, inputs], floating point."""
        functions = library.load()
        assert weight.shape == (len(outputs), self.inputs), "a weight keeps its shape"
        outputs = outputs.contiguous()
        where = outputs.data_ptr(), len(outputs)
        if self.format in (Format.FLOAT32, Format.BFLOAT16):
            dtype = torch.float32 if self.format == Format.FLOAT32 else torch.bfloat16
            plain = weight.detach().to("cpu", dtype).contiguous()
            functions.outrider_weight_pack(self.handle, plain.data_ptr(), *where)
            return
        quantize = quantize_int8 if self.format == Format.INT8 else quantize_int4
        values, scales = quantize(weight.detach().to("cpu", torch.float32))
        functions.outrider_weight_pack_quantized(self.handle, values.data_ptr(), scales.data_ptr(), *where)


def packed(weight: Tensor, number_format: Format) -> PackedWeight:
    """A whole weight, [outputs, inputs], laid out."""
    made = PackedWeight(*weight.shape, number_format)
    made.fill(torch.arange(len(weight)), weight)
    return made


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [n, k] float32. Returns values [n, k] int8 in -127 .. 127, and scales [n] float32."""
    scales = weight.abs().amax(1).clamp(min=1e-30) / 127.0
    return (weight / scales[:, None]).round_().to(torch.int8).contiguous(), scales.contiguous()


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [n, k] float32. Returns values [n, k] int8 in -8 .. 7, and scales [n, groups] float32.

    Each group's scale is the one of a few that errs least; the largest number may be clipped.
    """
    n, k = weight.shape
    groups = -(-k // GROUP)
    padded = torch.nn.functional.pad(weight, (0, groups * GROUP - k)).view(n, groups, GROUP)
    # The number that is largest by magnitude becomes -8, the end that reaches further.
    index = padded.abs().argmax(2, keepdim=True)
    full = padded.gather(2, index).squeeze(2) / -8.0
    full = torch.where(full.abs() < 1e-30, 1e-30, full)
    best_error = torch.full((n, groups), torch.inf)
    scales, values = full.clone(), torch.zeros_like(padded)
    for clipping in _CLIPPINGS:
        scale = (full * clipping).to(torch.float16).float()  # as it is stored
        scale = torch.where(scale == 0.0, 1e-7, scale)
        rounded = (padded / scale[..., None]).round_().clamp_(-8, 7)
        error = (rounded * scale[..., None] - padded).square_().sum(2)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        scales = torch.where(better, scale, scales)
        values = torch.where(better[..., None], rounded, values)
    values = values.view(n, groups * GROUP)[:, :k]
    return values.to(torch.int8).contiguous(), scales.contiguous()
