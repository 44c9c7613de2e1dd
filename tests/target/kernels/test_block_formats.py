"""Block formats: checkpoints' own numbers, and products that equal those of their twin in Python."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch.nn import functional

from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import (
    GROUP,
    Format,
    PackedWeight,
    packed,
    quantize_int4,
    quantize_int8,
    stored_format,
)
from services.target.kernels.cpu.pool import shared_pool

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine"),
]
# Where a block has half-precision numbers, in bytes.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip
FORMATS = [stored_format(name) for name in HALVES]


def random_rows(name: str, outputs: int, blocks: int, *, extreme: bool) -> np.ndarray:
    """Rows of a GGUF tensor with random bits. extreme: scales of every finite size, subnormal ones included."""
    rng = np.random.default_rng(len(name) + outputs + blocks)
    rows = rng.integers(0, 256, (outputs, blocks, gguf.GGML_QUANT_SIZES[Type[name]][1]), dtype=np.uint8)
    for at in HALVES[name]:
        halves = (rng.standard_normal((outputs, blocks, 1)) * 0.01).astype(np.float16)
        if extreme:
            bits = (
                rng.integers(0, 0x7C00, halves.shape, dtype=np.uint16)
                | rng.integers(0, 2, halves.shape, dtype=np.uint16) << 15
            )
            halves = np.where(rng.random(halves.shape) < 0.5, bits.view(np.float16), halves)
        rows[:, :, at : at + 2] = halves.view(np.uint8)
    return rows.reshape(outputs, -1)


def stored(name: str, outputs: int, blocks: int, *, extreme: bool = False) -> tuple[PackedWeight, torch.Tensor]:
    """A weight of random rows, packed in an order of their own, and its numbers as the reader dequantizes them."""
    rows = random_rows(name, outputs, blocks, extreme=extreme)
    weight = PackedWeight(outputs, blocks * gguf.GGML_QUANT_SIZES[Type[name]][0], stored_format(name))
    for order in np.array_split(np.random.default_rng(0).permutation(outputs), 2):
        weight.fill_stored(torch.from_numpy(order), torch.from_numpy(rows[order]), name)
    return weight, torch.from_numpy(gguf.quants.dequantize(rows, Type[name]))


def multiplied(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    x, y = x.contiguous(), torch.empty(len(x), weight.outputs)
    library.load().outrider_linear(shared_pool().handle, weight.handle, None, x.data_ptr(), y.data_ptr(), len(x), False)
    return y


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Activations as products take them: 8 bits with a scale for each 64. Plain twin of operand.h."""
    inputs = x.shape[1]
    groups = functional.pad(x, (0, -inputs % GROUP)).unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2, keepdim=True) / 127.0
    return (torch.round(groups * (1.0 / scales)) * scales).flatten(1)[:, :inputs]


def assert_products(weight: PackedWeight, wide: torch.Tensor) -> None:
    """Products are those of the twin but for rounding of float32 sums; a row's bits do not depend on its batch."""
    torch.manual_seed(6)
    x = torch.randn(40, weight.inputs) * torch.exp2(torch.randn(40, 1) * 4)
    if weight.format == Format.FLOAT8:  # multiplied in bfloat16 or float32
        x = x.bfloat16().float()
    y = multiplied(weight, x)
    exact = (x if weight.format == Format.FLOAT8 else in_8_bits(x)).double()
    sizes = exact.abs() @ wide.double().abs().T
    assert ((y - exact @ wide.double().T).abs() <= 1e-6 * sizes).all()
    for count in (*range(1, 14), 25, 29):
        assert torch.equal(multiplied(weight, x[:count]), y[:count])
    assert torch.equal(multiplied(weight, x[-7:]), y[-7:])


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize(("outputs", "blocks"), [(33, 3), (64, 2), (17, 1)])
def test_numbers_are_those_of_the_file_bit_by_bit(name, outputs, blocks):
    weight, wide = stored(name, outputs, blocks, extreme=True)
    assert torch.equal(weight.dequantized().view(torch.int32), wide.view(torch.int32))
    assert torch.equal(weight.rows(torch.tensor([outputs - 1, 0])), wide[[outputs - 1, 0]])


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize(("outputs", "blocks"), [(70, 3), (17, 1)])
def test_products_are_those_of_the_twin(name, outputs, blocks):
    assert_products(*stored(name, outputs, blocks))


def random_parts(number_format: Format, outputs: int, inputs: int, groups: int) -> list[torch.Tensor | None]:
    """Arrays as `fill_blocks` takes them, with values and scales of every size."""
    torch.manual_seed(7)
    shapes = PackedWeight(1, inputs, number_format, groups=groups)._shapes(outputs)
    bits = {"4": 4, "5": 5, "8": 8, "6": 6}[number_format.name[-1]]
    parts: list[torch.Tensor | None] = [torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)]
    for kind in shapes[1:]:
        if kind is None:
            parts.append(None)
        elif kind[0] == torch.float16:
            parts.append(torch.randn(kind[1]).half() * 0.01)
        else:
            limits = torch.iinfo(kind[0])
            parts.append(torch.randint(limits.min, limits.max + 1, kind[1], dtype=kind[0]))
    return parts


def dequantized_parts(number_format: Format, parts: list[torch.Tensor | None], groups: int) -> torch.Tensor:
    """Plain twin of block formats: w = scale * (value - zero), or scale * value + minimum."""
    values, scales, minima, units, minimum_units = parts
    inputs = values.shape[1]
    zero = {Format.SYMMETRIC4: 8, Format.SYMMETRIC5: 16, Format.SYMMETRIC8: 128, Format.K6: 32}.get(number_format, 0)
    spread = lambda part, length: part.float().repeat_interleave(length, 1)[:, :inputs]  # noqa: E731
    block = 16 if number_format == Format.K6 else 32
    scale = spread(scales, block)
    if units is not None:
        scale = scale * spread(units, groups * GROUP)
    wide = (values.float() - zero).double() * scale
    if minima is not None:
        minimum = spread(minima, block)
        wide += minimum if minimum_units is None else minimum * spread(minimum_units, groups * GROUP)
    return wide.float()


@pytest.mark.parametrize("number_format", FORMATS)
def test_parts_of_other_checkpoints(number_format):
    """Inputs of a part of a block; super-blocks of 128, as of GPTQ and AWQ in groups of 128."""
    inputs, groups = 330, 2
    parts = random_parts(number_format, 37, inputs, groups)
    weight = PackedWeight(37, inputs, number_format, groups=groups)
    weight.fill_blocks(torch.arange(37), *parts)
    wide = weight.dequantized()
    torch.testing.assert_close(wide, dequantized_parts(number_format, parts, groups), rtol=0.0, atol=0.0)
    assert_products(weight, wide)


def test_zero_points_of_a_group_are_minima_of_a_super_block():
    torch.manual_seed(8)
    values, zeros = torch.randint(0, 16, (40, 256), dtype=torch.uint8), torch.randint(0, 16, (40, 2), dtype=torch.uint8)
    scales = (torch.rand(40, 2) * 0.01).half()
    weight = PackedWeight(40, 256, Format.K4, groups=2)
    weight.fill_blocks(
        torch.arange(40), values, torch.ones(40, 8, dtype=torch.uint8), zeros.repeat_interleave(4, 1), scales, -scales
    )
    wide = scales.float().repeat_interleave(128, 1) * (values.float() - zeros.float().repeat_interleave(128, 1))
    torch.testing.assert_close(weight.dequantized(), wide, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("value", [0, -1])
def test_the_largest_values_overflow_nowhere(number_format, value):
    """All of one sign, so that sums grow as far as they can. value: the smallest or the largest"""
    parts = random_parts(number_format, 32, 512, 4)
    bits = int(number_format.name[-1])
    parts[0].fill_(value % 2**bits)
    weight = PackedWeight(32, 512, number_format)
    weight.fill_blocks(torch.arange(32), *parts)
    wide = weight.dequantized().double()
    for sign in (1.0, -1.0):
        x = torch.full((13, 512), sign * 127.0)
        right = x.double() @ wide.T
        assert ((multiplied(weight, x) - right).abs() <= 1e-6 * (x.double().abs() @ wide.abs().T)).all()


@pytest.mark.usefixtures("multiplied_by")
@pytest.mark.parametrize(("inputs", "groups"), [(330, 2), (64, 1), (330, 6)])  # blocks of 128 and 64, a scale a row
def test_8_bit_floats_are_the_numbers_of_the_file(inputs, groups):
    """Every number, subnormal ones and both zeros included, in units of every size."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[~codes.view(torch.float8_e4m3fn).float().isnan()].repeat(-(-37 * inputs // 254))
    codes = codes[: 37 * inputs].reshape(37, inputs)
    blocks = -(-inputs // (groups * GROUP))
    scales = torch.randn(37, blocks) * torch.exp2(torch.randn(37, blocks) * 8)
    weight = PackedWeight(37, inputs, Format.FLOAT8, groups=groups)
    for part in torch.randperm(37, generator=torch.Generator().manual_seed(1)).split(20):
        weight.fill_blocks(part, codes[part], scale_units=scales[part])
    wide = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(groups * GROUP, 1)[:, :inputs]
    assert torch.equal(weight.dequantized().view(torch.int32), wide.view(torch.int32))
    assert weight.bytes == 64 * blocks * (groups * GROUP + 4)
    assert_products(weight, wide)
    small = codes.masked_fill(codes & 0x78 > 0, 0)  # products of subnormal numbers alone
    weight.fill_blocks(torch.arange(37), small, scale_units=scales)
    assert weight.dequantized().any()
    assert_products(weight, weight.dequantized())


@pytest.mark.parametrize(
    ("number_format", "groups"),
    [(Format.BFLOAT16, 1), (Format.INT8, 1), *((Format.FLOAT8, groups) for groups in (1, 2, 5, 9, 18))],
)
def test_rows_that_exceed_the_cache_have_the_bits_of_few(number_format, groups):
    """A matrix unit multiplies them a block of k at a time, with some panels together."""
    torch.manual_seed(8)
    weight = PackedWeight(330, 1100, number_format, groups=groups)
    weight.fill(torch.arange(330), torch.randn(330, 1100))
    x = torch.randn(960, 1100)
    together = multiplied(weight, x)
    for first in (0, 17, 940):
        assert torch.equal(multiplied(weight, x[first : first + 20]), together[first : first + 20])


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_weights_are_rounded_to_8_bit_floats(groups):
    torch.manual_seed(3)
    wide = torch.randn(300, 330) * torch.exp2(torch.randn(300, 1) * 8)
    wide[7] = 0.0
    weight = PackedWeight(300, 330, Format.FLOAT8, groups=groups)
    weight.fill(torch.arange(300), wide)
    blocks = torch.nn.functional.pad(wide, (0, -330 % (groups * GROUP))).unflatten(1, (-1, groups * GROUP))
    largest = blocks.abs().amax(2).repeat_interleave(groups * GROUP, 1)[:, :330]
    # Half of the last of three bits, or of the smallest number, 2^-9; the largest number is 448.
    bounds = torch.maximum(wide.abs() * 2.0**-4, largest / 448 * 2.0**-10)
    assert ((weight.dequantized() - wide).abs() <= bounds * 1.001).all()


def test_types_without_a_block_format_are_widened():
    assert stored_format("Q3_K") is stored_format("IQ4_NL") is stored_format("F16") is None
    weight = PackedWeight(32, 256, Format.K4)
    with pytest.raises(AssertionError, match="each GGUF type"):
        weight.fill_stored(torch.arange(32), torch.zeros(32, 144, dtype=torch.uint8), "Q5_K")
    with pytest.raises(AssertionError, match="a K4 weight has parts"):
        weight.fill_blocks(torch.arange(32), torch.zeros(32, 256, dtype=torch.uint8), torch.ones(32, 8).half())


def test_other_formats_are_read_back_too():
    torch.manual_seed(9)
    weight = torch.randn(40, 100)
    assert torch.equal(packed(weight, Format.FLOAT32).dequantized(), weight)
    assert torch.equal(packed(weight, Format.BFLOAT16).dequantized(), weight.bfloat16().float())
    values, scales = quantize_int8(weight)
    assert torch.equal(packed(weight, Format.INT8).dequantized(), values.float() * scales[:, None])
    values, *facts = quantize_int4(weight)
    scales, centres = (fact.repeat_interleave(32, 1)[:, :100] for fact in facts)
    torch.testing.assert_close(
        packed(weight, Format.INT4).dequantized(), values * scales + centres, rtol=0.0, atol=1e-6
    )
