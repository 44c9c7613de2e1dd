"""Packed linear layers: what nn.Linear computes, and the same bits for a row in any company."""

import pytest
import torch
from torch import nn

from services.target.model.linear import PackedLinear, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_is_linear(dtype, bias):
    torch.manual_seed(0)
    linear = nn.Linear(96, 200, bias=bias, dtype=dtype)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        for rows in (1, 3, 70):
            x = torch.randn(1, rows, 96, dtype=dtype)
            torch.testing.assert_close(packed(x), linear(x))
        x = torch.randn(64, 96, dtype=dtype)
        together = packed(x)
        for count in (1, 2, 8, 33):
            assert torch.equal(packed(x[:count]), together[:count])
    assert torch.equal(packed.weight, linear.weight)


def test_pack_replaces_linear_layers_and_no_others():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), Special(8, 8))
    x = torch.randn(2, 8)
    before = model(x)
    assert pack(model) == 2
    assert [type(layer) for layer in (model[0], model[1][0], model[2])] == [PackedLinear, PackedLinear, Special]
    torch.testing.assert_close(model(x), before)


def test_half_precision_stays_as_it_is():
    assert pack(nn.Sequential(nn.Linear(8, 8, dtype=torch.float16))) == 0
