"""Weights of linear layers, laid out for the kernels; quantized on the way where asked for.

int8: symmetric, a scale an output. int4: a scale and a centre for each 32 inputs of an output. Activations are then
quantized to 8 bits as they come, with a scale for each 64 of a row.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.native import freed_with
from services.target.kernels.cpu import library

GROUP = 64  # activations of a scale
BLOCK = 32  # int4 weights of a scale
# Steps of a block's scale between its least and its largest number. 15 are all that there are, so with more the ends
# are clipped; fewer find the steps of weights that once were 4 bits in longer blocks, of which this one has a part.
_STEPS = (15, 16, 17, *range(14, 7, -1))
_AT_ONCE = 2**18  # numbers, few enough to stay in caches


class Format(enum.IntEnum):
    """Number formats of weights, as in outrider/native/include/weight.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


class PackedWeight:
    """A weight in the kernels' memory. handle: its address."""

    def __init__(self, outputs: int, inputs: int, number_format: Format, *, rough: bool = False) -> None:
        """rough: int4 is quantized at once, instead of searching for what errs least."""
        functions = library.load()
        self._steps = _STEPS[:1] if rough else _STEPS
        self.outputs, self.inputs, self.format = outputs, inputs, number_format
        self.handle: int = functions.outrider_weight_new(number_format, outputs, inputs)
        freed_with(self, functions.outrider_weight_free, self.handle)

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
        plain = weight.detach().to("cpu", torch.float32)
        if self.format == Format.INT8:
            values, scales = quantize_int8(plain)
            centres = None
        else:
            values, scales, centres = quantize_int4(plain, self._steps)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in (values, scales, centres))
        functions.outrider_weight_pack_quantized(self.handle, *addresses, *where)


def interleaved(count: int, part: int) -> Tensor:
    """Where so many gates (part 0) or values (part 1) go in a weight of 16 gates, their 16 values, ... [count]."""
    outputs = torch.arange(count)
    return outputs // 16 * 32 + outputs % 16 + part * 16


def packed(weight: Tensor, number_format: Format) -> PackedWeight:
    """A whole weight, [outputs, inputs], laid out."""
    outputs, inputs = weight.shape
    made = PackedWeight(outputs, inputs, number_format)
    made.fill(torch.arange(len(weight)), weight)
    return made


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [n, k] float32. Returns values [n, k] int8 in -127 .. 127, and scales [n] float32."""
    scales = weight.abs().amax(1).clamp(min=1e-30) / 127.0
    return (weight / scales[:, None]).round_().to(torch.int8).contiguous(), scales.contiguous()


def quantize_int4(weight: Tensor, steps: Sequence[int] = _STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """weight: [n, k] float32. Returns values [n, k] int8 in -8 .. 7, and scales and centres, [n, blocks] float32.

    A number is value * scale + centre. Each block's steps are those of a few that err least. Weights that had 4 bits in
    such blocks before (GGUF's Q4_0 and Q4_1, AWQ, GPTQ) come out as they were. Blocks come in pairs, of which the last
    one may be empty. steps: those that are tried.
    """
    n, k = weight.shape
    blocks = 2 * -(-k // GROUP)
    padded = torch.nn.functional.pad(weight, (0, blocks * BLOCK - k)).view(n, blocks, BLOCK)
    parts = [_quantize_blocks(part, steps) for part in padded.split(max(1, _AT_ONCE // (blocks * BLOCK)))]
    values, scales, centres = (torch.cat(some) for some in zip(*parts, strict=True))
    return values.view(n, blocks * BLOCK)[:, :k].contiguous(), scales, centres


def _quantize_blocks(weight: Tensor, tried: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """weight: [n, blocks, 32]. Returns values of that shape, scales and centres, [n, blocks]."""
    least, largest = weight.amin(2), weight.amax(2)
    best = torch.full_like(least, torch.inf)
    rounding = weight.square().sum(2) * 2.0**-16  # more than bfloat16's
    scales, centres, values = torch.empty_like(least), torch.empty_like(least), torch.zeros_like(weight)
    for steps in tried:
        scale = ((largest - least) / steps).clamp(min=1e-7).half().float()  # as they are stored
        middle = (least + largest) / 2 if steps > 15 else least + 7.5 * scale
        centre = (middle + 0.5 * scale).bfloat16().float()
        rounded = ((weight - centre[..., None]) / scale[..., None]).round_().clamp_(-8, 7)
        error = (rounded * scale[..., None] + centre[..., None] - weight).square_().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scales, centres = torch.where(better, scale, scales), torch.where(better, centre, centres)
        values = torch.where(better[..., None], rounded, values)
        if bool((best <= rounding).all()):
            break
    return values.to(torch.int8), scales, centres
