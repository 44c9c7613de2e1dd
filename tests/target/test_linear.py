"""Packed linear layers: what nn.Linear computes, and the same bits for a row in any company."""

import pytest
import torch
from torch import nn

from services.target.kernels.cpu import library
from services.target.kernels.cpu.weights import GROUP, Format, quantize_int4, quantize_int8
from services.target.model.linear import NativeLinear, PackedLinear, pack

needs_kernels = pytest.mark.skipif(not library.available(), reason="the CPU kernels cannot be had on this machine")
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
    if number_format == Format.INT8:
        values, scales = quantize_int8(weight)
        return values.float() * scales[:, None]
    values, scales = quantize_int4(weight)
    return values.float() * scales.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


@needs_kernels
@pytest.mark.parametrize("number_format", [Format.INT8, Format.INT4])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (33, 70), (200, 448), (17, 5)])
def test_narrow_weights_multiply_as_their_twins(number_format, outputs, inputs):
    torch.manual_seed(1)
    weight = torch.randn(outputs, inputs)
    linear = nn.Linear(inputs, outputs, bias=False)
    with torch.inference_mode():
        linear.weight.copy_(weight)
        narrow = NativeLinear(linear, number_format)
        twin = _dequantized(weight, number_format)
        # Activations that 8 bits hold exactly: whole numbers, with the largest that there is in each group of 64.
        x = torch.randint(-127, 128, (40, inputs)).float()
        x[:, ::GROUP] = 127.0
        torch.testing.assert_close(narrow(x), x @ twin.T, rtol=1e-4, atol=1e-2)
        # Any others: within what rounding to 8 bits costs.
        x = torch.randn(40, inputs)
        error = (narrow(x) - x @ twin.T).square().mean().sqrt() / (x @ twin.T).square().mean().sqrt()
        assert error < 0.02
        together = narrow(x)
        for count in (1, 2, 5, 8, 13, 29):
            assert torch.equal(narrow(x[:count]), together[:count])


def test_narrow_weights_err_little():
    torch.manual_seed(2)
    weight = torch.randn(64, 256)
    for number_format, limit in ((Format.INT8, 0.012), (Format.INT4, 0.13)):
        twin = _dequantized(weight, number_format)
        assert (twin - weight).square().mean().sqrt() < limit


def test_pack_replaces_linear_layers_and_no_others():
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
