"""Weights of linear layers, packed for the kernels and optionally quantized.

int8: symmetric, one scale an output. int4: a scale and a centre for each 32 inputs of an output. Block formats
(outrider/native/include/weights/format.h) hold the numbers of checkpoints that are quantized already, without loss.
With all of them but FLOAT8 the kernels quantize activations to 8 bits, with a scale for each 64 numbers of a row.
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
    """Number formats of weights, as in outrider/native/include/weights/format.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    SYMMETRIC4 = 4
    SYMMETRIC5 = 5
    SYMMETRIC8 = 6
    AFFINE4 = 7
    AFFINE5 = 8
    K4 = 9
    K5 = 10
    K6 = 11
    FLOAT8 = 12


_UNITS = (Format.K4, Format.K5, Format.K6, Format.FLOAT8)
"""Formats with super-blocks: of numbers in whose units the scales of blocks are, or, of FLOAT8, the values."""
GGUF_GROUPS = 4
"""Groups of a super-block in GGUF files."""
_GGUF = {
    "Q4_0": Format.SYMMETRIC4,
    "Q5_0": Format.SYMMETRIC5,
    "Q8_0": Format.SYMMETRIC8,
    "Q4_1": Format.AFFINE4,
    "Q5_1": Format.AFFINE5,
    "Q4_K": Format.K4,
    "Q5_K": Format.K5,
    "Q6_K": Format.K6,
}


def stored_format(ggml_type: str) -> Format | None:
    """The block format that holds a GGUF type's numbers; None if there is none, and the weight has to be widened."""
    return _GGUF.get(ggml_type)


ROUNDED = (Format.INT8, Format.INT4, Format.FLOAT8)
"""Formats to which `fill` rounds any weight."""
_PLAIN = (Format.FLOAT32, Format.BFLOAT16)  # packed as fast as they are copied
_ROWS = 256  # that are rounded to 8-bit floats at a time
_LARGEST_E4M3 = 448.0


class PackedWeight:
    """A packed weight, in memory of its own or in a mapped file of packed weights.

    restored: it lies in the file, so that filling it does nothing
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        number_format: Format,
        *,
        rough: bool = False,
        groups: int = GGUF_GROUPS,
        temporary: bool = False,
    ) -> None:
        """rough: quantize int4 with one candidate scale instead of searching for the smallest error.

        groups: of 64 inputs in a super-block, for K formats. temporary: not for a file of packed weights
        """
        functions = library.load()
        self._steps = torch.tensor(STEPS[:1] if rough else STEPS, dtype=torch.int32)
        self.outputs, self.inputs, self.format = outputs, inputs, number_format
        self.groups = groups if number_format in _UNITS else 1
        self._handle: int = functions.outrider_weight_new(number_format, outputs, inputs, self.groups)
        freed_with(self, functions.outrider_weight_free, self._handle)
        self.restored, self._placed = False, False
        self._asks = number_format not in _PLAIN and not temporary
        self._file: object = None  # the mapped file that it lies in

    @property
    def handle(self) -> int:
        """Its address. It has memory from now on."""
        if not self._placed:
            self._placed = True
            library.load().outrider_weight_allocate(self._handle)
        return self._handle

    def memory(self) -> list[packed_file.Part]:
        """As of packed_file.Restorable."""
        parts = (ctypes.c_int64 * 4)()
        library.load().outrider_weight_memory(self._handle, parts)
        return [(parts[0], parts[1]), (parts[2], parts[3])]

    def restore(self) -> bool:
        """Take the weight from the file of packed weights, if there is one. True if the file has it."""
        if self._asks and not self._placed and (file := packed_file.active()) is not None:
            self._asks = False
            name = f"{self.format.name} {self.outputs} x {self.inputs}, {self.groups} groups, {len(self._steps)} steps"
            if (addresses := file.take(self, name)) is not None:
                library.load().outrider_weight_place(self._handle, *addresses)
                self._file, self._placed, self.restored = file.mapped, True, True
        return self.restored

    @property
    def bytes(self) -> int:
        """Bytes that a step reads."""
        return int(library.load().outrider_weight_bytes(self._handle))

    def fill(self, outputs: Tensor, weight: Tensor) -> None:
        """Pack some outputs. outputs: [n] int64, their indices; weight: [n, inputs], floating point.

        In formats of checkpoints, only FLOAT8 takes any weight, which it rounds.
        """
        if self.restore():
            return
        if self.format == Format.FLOAT8:
            for begin in range(0, len(outputs), _ROWS):
                codes, scales = quantize_float8(weight[begin : begin + _ROWS], self.groups * GROUP)
                self.fill_blocks(outputs[begin : begin + _ROWS], codes, scale_units=scales)
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
        if self.restore():
            return
        parts = [tensor if tensor is None else tensor.contiguous() for tensor in (values, scales, centres, outputs)]
        addresses = (None if part is None else part.data_ptr() for part in parts)
        library.load().outrider_weight_pack_quantized(self.handle, *addresses, len(outputs))

    def fill_stored(self, outputs: Tensor, rows: Tensor, ggml_type: str) -> None:
        """Pack some outputs as a GGUF file has them. outputs: [n] int64; rows: [n, bytes of a row] uint8."""
        assert stored_format(ggml_type) == self.format, "each GGUF type has its block format"
        assert self.groups == (GGUF_GROUPS if self.format in _UNITS else 1), "GGUF has super-blocks of 256"
        assert rows.dtype == torch.uint8, "rows are bytes"
        if self.restore():
            return
        rows, outputs = rows.contiguous(), outputs.contiguous()
        with packed_file.computing():
            library.load().outrider_weight_pack_gguf(
                self.handle, rows.data_ptr(), rows.shape[1], outputs.data_ptr(), len(outputs), torch.get_num_threads()
            )

    def fill_blocks(
        self,
        outputs: Tensor,
        values: Tensor,
        scales: Tensor | None = None,
        minima: Tensor | None = None,
        scale_units: Tensor | None = None,
        minimum_units: Tensor | None = None,
    ) -> None:
        """Pack some outputs of a block format from their parts.

        outputs: [n] int64; values: [n, inputs] uint8. Symmetric formats: w = scale * (value - zero), with zero 8, 16,
        128 or, of K6, 32; affine ones: w = scale * value + minimum. scales, minima: [n, blocks] float16, or of K
        formats uint8 (K6: int8) in units of scale_units and minimum_units, [n, super-blocks] float16. GPTQ and AWQ,
        scale * (value - zero point): scale 1 in units of theirs, minimum `zero point` in units of minus theirs. FLOAT8:
        values are bits of E4M3 without NaN, w = value * unit, scale_units [n, super-blocks] float32.
        """
        parts = (values, scales, minima, scale_units, minimum_units)
        kept = [None if part is None else part.contiguous() for part in parts]
        rows = library.BlockRow(*(None if part is None else part.data_ptr() for part in kept))
        expected = self._shapes(len(outputs))
        found = [None if part is None else (part.dtype, tuple(part.shape)) for part in kept]
        assert found == expected, f"a {self.format.name} weight has parts {expected}, not {found}"
        outputs = outputs.contiguous()
        if self.restore():
            return
        with packed_file.computing():
            library.load().outrider_weight_pack_arrays(
                self.handle, ctypes.byref(rows), outputs.data_ptr(), len(outputs), torch.get_num_threads()
            )

    def _shapes(self, count: int) -> list[tuple[torch.dtype, tuple[int, int]] | None]:
        """Types and shapes of the parts of `fill_blocks`, which are None where the format has none."""
        if self.format == Format.FLOAT8:
            supers = torch.float32, (count, -(-self.inputs // (self.groups * GROUP)))
            return [(torch.uint8, (count, self.inputs)), None, None, supers, None]
        affine = self.format in (Format.AFFINE4, Format.AFFINE5, Format.K4, Format.K5)
        blocks = count, -(-self.inputs // (BLOCK // 2 if self.format == Format.K6 else BLOCK))
        number = torch.float16
        if self.format in _UNITS:
            number = torch.uint8 if affine else torch.int8
        units = (torch.float16, (count, -(-self.inputs // (self.groups * GROUP))))
        return [
            (torch.uint8, (count, self.inputs)),
            (number, blocks),
            (number, blocks) if affine else None,
            units if self.format in _UNITS else None,
            units if self.format in _UNITS and affine else None,
        ]

    def rows(self, outputs: Tensor) -> Tensor:
        """Some outputs as float32, [n, inputs]; of block formats the checkpoint's numbers. outputs: [n] int64."""
        outputs = outputs.contiguous()
        wide = torch.empty(len(outputs), self.inputs)
        library.load().outrider_weight_dequantize(
            self.handle, outputs.data_ptr(), len(outputs), wide.data_ptr(), torch.get_num_threads()
        )
        return wide

    def dequantized(self) -> Tensor:
        """The whole weight as float32, [outputs, inputs]."""
        return self.rows(torch.arange(self.outputs))


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


def quantize_float8(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """weight: [n, k]; block: inputs of a scale. Returns bits of E4M3, [n, k] uint8, and float32 scales, [n, blocks]."""
    n, k = weight.shape
    blocks = -(-k // block)
    wide = torch.nn.functional.pad(weight.detach().to("cpu", torch.float32), (0, blocks * block - k))
    wide = wide.view(n, blocks, block)
    scales = wide.abs().amax(2).clamp(min=1e-30) / _LARGEST_E4M3
    values = (wide / scales[..., None]).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    return values.view(torch.uint8).view(n, blocks * block)[:, :k].contiguous(), scales


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
