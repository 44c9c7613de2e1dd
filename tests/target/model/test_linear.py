"""Packed linear layers: the results of nn.Linear, and batch invariance."""

import pytest
import torch
from torch import nn

from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import (
    BLOCK,
    GROUP,
    STEPS,
    Format,
    PackedWeight,
    quantize_int4,
    quantize_int8,
)
from services.target.kernels.cpu.pool import Pool
from services.target.model.linear import NativeLinear, PackedLinear, pack

pytestmark = pytest.mark.threads
needs_kernels = pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")
ONE_DNN = pytest.param(PackedLinear, id="onednn")
OURS = pytest.param(
    lambda linear: NativeLinear(linear, Format.FLOAT32 if linear.weight.dtype == torch.float32 else Format.BFLOAT16),
    id="ours",
    marks=needs_kernels,
)


@pytest.mark.parametrize("make", [ONE_DNN, OURS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_is_linear(make, dtype, bias):
    if make is PackedLinear and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this processor")
    torch.manual_seed(0)
    linear = nn.Linear(96, 200, bias=bias, dtype=dtype)
    packed = make(linear)
    with torch.inference_mode():
        for rows in (1, 3, 70):
            x = torch.randn(1, rows, 96, dtype=dtype)
            torch.testing.assert_close(packed(x), linear(x))
        x = torch.randn(64, 96, dtype=dtype)
        together = packed(x)
        for count in (1, 2, 8, 33):
            assert torch.equal(packed(x[:count]), together[:count])
    assert torch.equal(packed.weight, linear.weight)
    other = torch.randn(200, 96, dtype=dtype)
    packed.replace_weight(other)
    assert torch.equal(packed.weight, other)


def _dequantized(weight, number_format):
    """Weights as they are stored, and apart from them what int4 adds to all of a block."""
    if number_format == Format.INT8:
        values, scales = quantize_int8(weight)
        return values.float() * scales[:, None], torch.zeros_like(weight)
    values, *facts = quantize_int4(weight)
    scales, centres = (fact.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]] for fact in facts)
    return values.float() * scales, centres


def _multiplied(x, weight, number_format):
    """x W^T with W as it is stored. Centres meet the sum of their block's activations, rounded to bfloat16."""
    values, centres = _dequantized(weight, number_format)
    blocks = nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).sum(2).bfloat16().float()
    return x @ values.T + blocks @ centres[:, ::BLOCK].T


@needs_kernels
@pytest.mark.parametrize("number_format", [Format.INT8, Format.INT4])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (33, 70), (200, 448), (17, 5)])
def test_narrow_weights_multiply_as_their_twins(number_format, outputs, inputs, multiplied_by):
    torch.manual_seed(1)
    weight = torch.randn(outputs, inputs)
    linear = nn.Linear(inputs, outputs, bias=False)
    with torch.inference_mode():
        linear.weight.copy_(weight)
        narrow = NativeLinear(linear, number_format)
        # Activations that 8 bits hold exactly: whole numbers, with the largest that there is in each group of 64.
        x = torch.randint(-127, 128, (40, inputs)).float()
        x[:, ::GROUP] = 127.0
        torch.testing.assert_close(narrow(x), _multiplied(x, weight, number_format), rtol=1e-4, atol=1e-2)
        # Any others: within what rounding to 8 bits costs.
        x = torch.randn(40, inputs)
        right = x @ sum(_dequantized(weight, number_format)).T
        assert (narrow(x) - right).square().mean().sqrt() < 0.02 * right.square().mean().sqrt()
        together = narrow(x)
        for count in (1, 2, 5, 8, 13, 29):
            assert torch.equal(narrow(x[:count]), together[:count])


@needs_kernels
@pytest.mark.parametrize("number_format", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rough", [False, True])
def test_quantizing_equals_its_twin_bit_by_bit(number_format, dtype, rough):
    """Rows of zeros, of one value, tiny and large ones included; several threads, outputs in any order."""
    torch.manual_seed(4)
    weight = torch.randn(150, 200)
    weight[3], weight[5, :64] = 0.0, 1.5
    weight[7:9] *= torch.tensor([[1e-9], [1e4]])
    weight = weight.to(dtype)
    order = torch.randperm(150)
    compiled, twin = (PackedWeight(150, 200, number_format, rough=rough) for _ in range(2))
    compiled.fill(order, weight)
    steps = STEPS[:1] if rough else STEPS
    twin.fill_quantized(
        order,
        *(quantize_int8(weight.float()) if number_format == Format.INT8 else quantize_int4(weight.float(), steps)),
    )
    x, pool = torch.randn(64, 200), Pool(1)
    results = [torch.empty(64, 150) for _ in range(2)]
    for one, y in zip((compiled, twin), results, strict=True):
        library.load().outrider_linear(pool.handle, one.handle, None, x.data_ptr(), y.data_ptr(), 64, False)
    assert torch.equal(*results)


@needs_kernels
@pytest.mark.parametrize("number_format", [Format.INT8, Format.INT4])
def test_the_largest_numbers_overflow_nowhere(number_format, multiplied_by):
    """All of one sign, so that sums grow as far as they can."""
    most = 127.0 if number_format == Format.INT8 else 15.0
    weight = torch.full((64, 256), most)
    weight[32:] = -most
    if number_format == Format.INT4:  # a step of 1 needs both ends in each block
        weight[:, ::32] = 0.0
    linear = nn.Linear(256, 64, bias=False)
    with torch.inference_mode():
        linear.weight.copy_(weight)
        narrow = NativeLinear(linear, number_format)
        for sign in (1.0, -1.0):
            x = torch.full((13, 256), sign * 127.0)
            torch.testing.assert_close(narrow(x), x @ weight.T, rtol=1e-6, atol=0.0)


def test_narrow_weights_err_little():
    torch.manual_seed(2)
    weight = torch.randn(64, 256)
    for number_format, limit in ((Format.INT8, 0.012), (Format.INT4, 0.09)):
        twin = sum(_dequantized(weight, number_format))
        assert (twin - weight).square().mean().sqrt() < limit


@pytest.mark.parametrize(("length", "lowest", "highest"), [(32, 0, 15), (32, -8, 7), (128, 0, 15)])
def test_weights_that_had_four_bits_keep_them(length, lowest, highest):
    """What GGUF (32, with a least number or symmetric) and AWQ (128) hold, once read as bfloat16."""
    torch.manual_seed(3)
    shape = 64, 512 // length
    drawn = (torch.randn(*shape, length) * 2.5 + (lowest + highest) / 2).round().clamp(lowest, highest)
    drawn[..., 0], drawn[..., length // 2] = lowest, highest  # their ends are what they took their steps from
    scale = (torch.rand(*shape, 1) * 0.01 + 0.002).half().float()
    shift = (torch.randn(*shape, 1) * 2).round() * scale
    weight = (drawn * scale + shift).bfloat16().float().view(64, -1)
    error = (sum(_dequantized(weight, Format.INT4)) - weight).abs()
    steps = scale.expand(*shape, length).reshape(64, -1)
    assert (error / steps).square().mean().sqrt() < 0.05  # rounding again at random would be 0.29


def test_pack_replaces_only_linear_layers():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), Special(8, 8))
    x = torch.randn(2, 8)
    before = model(x)
    assert pack(model) == 2
    kind = NativeLinear if library.available() else PackedLinear
    assert [type(layer) for layer in (model[0], model[1][0], model[2])] == [kind, kind, Special]
    torch.testing.assert_close(model(x), before)


def test_half_precision_stays_as_it_is():
    assert pack(nn.Sequential(nn.Linear(8, 8, dtype=torch.float16))) == 0


@needs_kernels
def test_weights_that_share_memory_outlive_one_another():
    torch.manual_seed(3)
    made = [nn.Linear(64, 8 + i, bias=False) for i in range(6)]
    packed = [NativeLinear(linear, Format.FLOAT32) for linear in made]
    x = torch.randn(3, 64)
    with torch.inference_mode():
        for gone in (0, 2):
            packed[gone] = NativeLinear(made[gone], Format.FLOAT32)  # the old one is freed, its neighbours stay
        for linear, one in zip(made, packed, strict=True):
            torch.testing.assert_close(one(x), linear(x))
        del packed[1:]
        torch.testing.assert_close(packed[0](x), made[0](x))


@needs_kernels
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (33, 70), (200, 448), (17, 5)])
def test_a_matrix_unit_multiplies_as_vectors_do(matrix_unit, outputs, inputs):
    torch.manual_seed(4)
    linear = nn.Linear(inputs, outputs)
    for number_format in (Format.INT8, Format.BFLOAT16):
        ours = NativeLinear(linear, number_format)
        for rows in (1, 2, 3, 9, 16, 17, 32, 33, 65, 130):
            x = torch.randn(rows, inputs)
            results = []
            for used in (1, 0):
                matrix_unit(used)
                results.append(ours(x))
            if number_format == Format.INT8:
                assert torch.equal(*results)
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("spread", [0.0, 20.0])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(spread, multiplied_by):
    """Numbers of many sizes, and sums below the normal ones, show every difference in order and rounding."""
    torch.manual_seed(5)
    linear = nn.Linear(577, 64, bias=False, dtype=torch.bfloat16)
    sizes = torch.exp2(torch.randn(64, 577) * spread - 20)
    with torch.inference_mode():
        linear.weight.copy_(torch.randn(64, 577) * sizes)
        ours = NativeLinear(linear, Format.BFLOAT16)
        x = torch.randn(100, 577) * torch.exp2(-torch.arange(10, 110)[:, None])
        together = ours(x)
        for count in (1, 2, 3, 8, 16, 17, 33, 99):
            assert torch.equal(ours(x[:count]), together[:count])
            assert torch.equal(ours(x[-count:]), together[-count:])
