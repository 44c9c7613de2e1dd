"""Weights of linear layers, packed for the kernels and optionally quantized.

int8: symmetric, one scale an output. int4: a scale and a centre for each 32 inputs of an output. With both, the kernels
quantize activations to 8 bits, with a scale for each 64 numbers of a row.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.native import freed_with
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices import packed_file

GROUP = 64
"""Activations per scale."""
BLOCK = 32
"""int4 weights per scale."""
STEPS = (15, 16, 17, *range(14, 7, -1))
"""Candidates for the number of quantization steps between a block's smallest and largest weight. int4 has 15; more clip
the ends; fewer recover the scale of weights that were quantized to 4 bits in longer blocks before."""


class Format(enum.IntEnum):
    """Number formats of weights, as in outrider/native/include/weight.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3


_QUANTIZED = (Format.INT8, Format.INT4)  # by us, which takes longer than reading them


class PackedWeight:
    """A packed weight in the kernels' memory.

    handle: its address. restored: it was read from a file of packed weights, so that filling it does nothing
    """

    def __init__(self, outputs: int, inputs: int, number_format: Format, *, rough: bool = False) -> None:
        """rough: quantize int4 with one candidate scale instead of searching for the smallest error."""
        functions = library.load()
        self._steps = torch.tensor(STEPS[:1] if rough else STEPS, dtype=torch.int32)
        self.outputs, self.inputs, self.format = outputs, inputs, number_format
        self.handle: int = functions.outrider_weight_new(number_format, outputs, inputs)
        freed_with(self, functions.outrider_weight_free, self.handle)
        self.restored = False
        if number_format in _QUANTIZED and (file := packed_file.active()) is not None:
            parts = (ctypes.c_int64 * 4)()
            functions.outrider_weight_memory(self.handle, parts)
            name = f"{number_format.name} {outputs} x {inputs}, {len(self._steps)} steps"
            file.take(self, name, (parts[0], parts[1]), (parts[2], parts[3]))

    @property
    def bytes(self) -> int:
        """Bytes that a step reads."""
        return int(library.load().outrider_weight_bytes(self.handle))

    def fill(self, outputs: Tensor, weight: Tensor) -> None:
        """Pack some outputs. outputs: [n] int64, their indices; weight: [n, inputs], floating point."""
        if self.restored:
            return
        functions = library.load()
        assert weight.shape == (len(outputs), self.inputs), "a weight keeps its shape"
        outputs = outputs.contiguous()
        where = outputs.data_ptr(), len(outputs)
        if self.format in (Format.FLOAT32, Format.BFLOAT16):
            dtype = torch.float32 if self.format == Format.FLOAT32 else torch.bfloat16
            plain = weight.detach().to("cpu", dtype).contiguous()
            functions.outrider_weight_pack(self.handle, plain.data_ptr(), *where)
            return
        dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        plain = weight.detach().to("cpu", dtype).contiguous()
        with packed_file.computing():
            functions.outrider_weight_quantize(
                self.handle, plain.data_ptr(), dtype == torch.bfloat16, *where,
                self._steps.data_ptr(), len(self._steps), torch.get_num_threads(),
            )  # fmt: skip

    def fill_quantized(self, outputs: Tensor, values: Tensor, scales: Tensor, centres: Tensor | None = None) -> None:
        """Pack some outputs of numbers as `quantize_int8` or `quantize_int4` return them."""
        if self.restored:
            return
        parts = [tensor if tensor is None else tensor.contiguous() for tensor in (values, scales, centres, outputs)]
        addresses = (None if part is None else part.data_ptr() for part in parts)
        library.load().outrider_weight_pack_quantized(self.handle, *addresses, len(outputs))


def interleaved(count: int, part: int) -> Tensor:
    """Output indices, [count] int64, of gates (part 0) or values (part 1) in a weight that alternates 16 of each."""
    outputs = torch.arange(count)
    return outputs // 16 * 32 + outputs % 16 + part * 16


def packed(weight: Tensor, number_format: Format) -> PackedWeight:
    """Pack a whole weight, [outputs, inputs]."""
    outputs, inputs = weight.shape
    made = PackedWeight(outputs, inputs, number_format)
    made.fill(torch.arange(len(weight)), weight)
    return made


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [n, k] float32. Returns values [n, k] int8 in -127 .. 127, and scales [n] float32.

    Plain twin of csrc/matrices/quantize.h.
    """
    scales = weight.abs().amax(1).clamp(min=1e-30) / 127.0
    return (weight / scales[:, None]).round_().to(torch.int8).contiguous(), scales.contiguous()


def quantize_int4(weight: Tensor, steps: Sequence[int] = STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """weight: [n, k] float32. Returns values [n, k] int8 in -8 .. 7, and scales and centres, [n, blocks] float32.

    A weight is value * scale + centre. Each block takes the candidate of `steps` with the smallest error. Weights that
    had 4 bits in such blocks before (GGUF's Q4_0 and Q4_1, AWQ, GPTQ) are reproduced exactly. Blocks come in pairs; the
    last one may be padding. Plain twin of csrc/matrices/quantize.h.
    """
    n, k = weight.shape
    blocks = 2 * -(-k // GROUP)
    wide = torch.nn.functional.pad(weight, (0, blocks * BLOCK - k)).view(n, blocks, BLOCK)
    least, largest = wide.amin(2), wide.amax(2)
    best = torch.full(least.shape, torch.inf, dtype=torch.float64)
    rounding = wide.double().square().sum(2) * 2.0**-16  # above the rounding error of bfloat16
    scales, centres, values = torch.empty_like(least), torch.empty_like(least), torch.zeros_like(wide)
    for tried in steps:
        scale = ((largest - least) / tried).clamp(min=1e-7).half().float()  # as stored
        middle = (least + largest) / 2 if tried > 15 else least + 7.5 * scale
        centre = (middle + 0.5 * scale).bfloat16().float()
        rounded = ((wide - centre[..., None]) / scale[..., None]).round_().clamp_(-8, 7)
        off = rounded.double() * scale[..., None] + centre.double()[..., None] - wide
        error = off.square_().sum(2)
        better = (error < best) & (best > rounding)
        best = torch.where(better, error, best)
        scales, centres = torch.where(better, scale, scales), torch.where(better, centre, centres)
        values = torch.where(better[..., None], rounded, values)
    return values.to(torch.int8).view(n, blocks * BLOCK)[:, :k].contiguous(), scales, centres
