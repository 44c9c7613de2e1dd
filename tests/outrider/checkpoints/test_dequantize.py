"""Quantized weights, number by number: each format against a slow twin, and against its own packages' tensors."""

import tracemalloc

import numpy as np
import pytest
import torch

from outrider.checkpoints import dequantize as module
from outrider.checkpoints.dequantize import dequantize, plain_shape
from outrider.errors import ConfigError
from tests.support.checkpoints import quantizers
from tests.support.checkpoints.quantizers import AWQ, COMPRESSED, FP8, GPTQ, PUBLISHED

OUTS, INS = 160, 192  # several chunks of rows, if a chunk is small


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 64 * INS)


def arrays(tensors):
    exact = (torch.int32, torch.int64, torch.int8, torch.uint8, torch.float16)
    return {name: (each if each.dtype in exact else each.float()).numpy() for name, each in tensors.items()}


@pytest.mark.parametrize("case", PUBLISHED)
def test_as_published(case):
    quantize, settings = PUBLISHED[case]
    torch.manual_seed(1)
    tensors, plain = quantize(torch.randn(OUTS, INS))
    found = dequantize("a", arrays(tensors), settings)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    np.testing.assert_allclose(found, plain.numpy(), rtol=1e-6, atol=1e-6)
    if "weight" not in tensors:
        shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        assert plain_shape(shapes, arrays(tensors).get("weight_shape"), settings) == (OUTS, INS)


# --- twins: the formats' own descriptions, a number at a time ---


def integer(words, at, bits):
    """The unsigned integer at an index in one row of words."""
    stream = sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
    return stream >> (at * bits) & ((1 << bits) - 1)


def gptq(tensors, bits, less):
    weight = np.empty((tensors["qweight"].shape[1], len(tensors["g_idx"])))
    for out, into in np.ndindex(weight.shape):
        group = tensors["g_idx"][into]
        zero = (integer(tensors["qzeros"][group], out, bits) + less) % 2**bits
        weight[out, into] = (integer(tensors["qweight"][:, out], into, bits) - zero) * float(
            tensors["scales"][group, out]
        )
    return weight


def awq(tensors, group_size):
    places = [0, 4, 1, 5, 2, 6, 3, 7]
    weight = np.empty((tensors["qweight"].shape[1] * 8, len(tensors["qweight"])))
    for out, into in np.ndindex(weight.shape):
        group, place = into // group_size, out // 8 * 8 + places[out % 8]
        zero = integer(tensors["qzeros"][group], place, 4)
        weight[out, into] = (integer(tensors["qweight"][into], place, 4) - zero) * float(tensors["scales"][group, out])
    return weight


def packed(tensors, bits, group_of):
    weight = np.empty(tensors["weight_shape"])
    for out, into in np.ndindex(weight.shape):
        group, zero = group_of[into], 0
        if "weight_zero_point" in tensors:
            zero = integer(tensors["weight_zero_point"][:, group], out, bits) - 2 ** (bits - 1)
        signed = integer(tensors["weight_packed"][out], into, bits) - 2 ** (bits - 1)
        weight[out, into] = (signed - zero) * tensors["weight_scale"][out, group]
    return weight


def scaled(weight, scales, block):
    found = np.empty(weight.shape)
    for out, into in np.ndindex(weight.shape):
        found[out, into] = weight[out, into] * scales[out // block[0], into // block[1]]
    return found


def words(random, *shape):
    return random.integers(-(2**31), 2**31, shape).astype(np.int32)


@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 16])
def test_gptq(bits, less):
    random = np.random.default_rng(bits)
    outs, ins, groups = 96, 64, 4
    tensors = {
        "qweight": words(random, ins * bits // 32, outs),
        "qzeros": words(random, groups, outs * bits // 32),
        "scales": random.random((groups, outs)).astype(np.float16),
        "g_idx": random.permutation(np.arange(ins) % groups).astype(np.int32),
    }
    settings = GPTQ | {"bits": bits, "checkpoint_format": "gptq" if less else "gptq_v2"}
    np.testing.assert_allclose(dequantize("a", tensors, settings), gptq(tensors, bits, less), rtol=1e-5)
    tensors["g_idx"] = np.arange(ins) * groups // ins
    expected = gptq(tensors, bits, less)
    np.testing.assert_allclose(dequantize("a", tensors, settings), expected, rtol=1e-5)
    del tensors["g_idx"]
    np.testing.assert_allclose(dequantize("a", tensors, settings), expected, rtol=1e-5)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("bits", "stated"), [(8, 4), (4, 8), (3, 4), (2, 8)])
def test_gptq_layers_may_have_other_bits_than_the_checkpoint(bits, stated, ordered):
    """As GPTQModel writes them; its `dynamic` selects layers by pattern."""
    torch.manual_seed(1)
    tensors, plain = quantizers.gptq(bits, symmetric=False)(torch.randn(OUTS, INS))
    if not ordered:
        del tensors["g_idx"]
    settings = {"quant_method": "gptq", "bits": stated}
    found = dequantize("a", arrays(tensors), settings)
    np.testing.assert_allclose(found, plain.numpy(), rtol=1e-6, atol=1e-6)
    assert plain_shape({name: tuple(each.shape) for name, each in tensors.items()}, None, settings) == (OUTS, INS)


def test_awq():
    random = np.random.default_rng(0)
    tensors = {
        "qweight": words(random, 48, 13),
        "qzeros": words(random, 3, 13),
        "scales": random.random((3, 104)).astype(np.float16),
    }
    np.testing.assert_allclose(dequantize("a", tensors, AWQ), awq(tensors, 16), rtol=1e-5)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_packed(bits):
    random = np.random.default_rng(bits)
    outs, ins, groups = 72, 60, 3
    tensors = {
        "weight_packed": words(random, outs, -(-ins * bits // 32)),
        "weight_shape": np.array([outs, ins]),
        "weight_scale": random.random((outs, groups)).astype(np.float32),
    }
    order = np.arange(ins) // 20
    np.testing.assert_allclose(dequantize("a", tensors, COMPRESSED), packed(tensors, bits, order), rtol=1e-5)
    order = tensors["weight_g_idx"] = random.permutation(order)
    tensors["weight_zero_point"] = words(random, -(-outs * bits // 32), groups)
    expected = packed(tensors, bits, order)
    np.testing.assert_allclose(dequantize("a", tensors, COMPRESSED), expected, rtol=1e-5)
    zeros = [[integer(tensors["weight_zero_point"][:, group], out, bits) - 2 ** (bits - 1) for group in range(groups)]
             for out in range(outs)]  # fmt: skip
    tensors["weight_zero_point"] = np.array(zeros, np.int8)
    np.testing.assert_allclose(dequantize("a", tensors, COMPRESSED), expected, rtol=1e-5)


@pytest.mark.parametrize("ins", [48, 56, 88])
def test_groups_that_do_not_divide_the_inputs(ins):
    """The last group is smaller, as in DeepSeek-V2-Lite: 10944 inputs in groups of 128."""
    random, size, outs = np.random.default_rng(ins), 32, 16
    groups = -(-ins // size)
    order = np.arange(ins) // size
    tensors = {
        "weight_packed": words(random, outs, ins * 4 // 32),
        "weight_shape": np.array([outs, ins]),
        "weight_scale": random.random((outs, groups)).astype(np.float32),
    }
    several = [{"weights": {"group_size": None}}, {"weights": {"group_size": 7}}, {"weights": {"group_size": size}}]
    settings = COMPRESSED | {"config_groups": dict(enumerate(several))}
    np.testing.assert_allclose(dequantize("a", tensors, settings), packed(tensors, 4, order), rtol=1e-5)
    integers = random.integers(-100, 100, (outs, ins)).astype(np.int8)
    found = dequantize("a", {"weight": integers, "weight_scale": tensors["weight_scale"]}, settings)
    np.testing.assert_allclose(found, integers * tensors["weight_scale"][:, order], rtol=1e-5)
    tensors = {
        "qweight": words(random, ins * 4 // 32, outs), "qzeros": words(random, groups, outs * 4 // 32),
        "scales": random.random((groups, outs)).astype(np.float16),
    }  # fmt: skip
    expected = gptq(tensors | {"g_idx": order}, 4, 1)
    np.testing.assert_allclose(dequantize("a", tensors, GPTQ | {"group_size": size}), expected, rtol=1e-5)


@pytest.mark.parametrize("block", [(32, 48), (50, 70)])
def test_blocks(block):
    random = np.random.default_rng(0)
    weight = random.standard_normal((OUTS, INS)).astype(np.float32)
    scales = random.random((-(-OUTS // block[0]), -(-INS // block[1]))).astype(np.float32)
    tensors, settings = {"weight": weight, "weight_scale_inv": scales}, FP8 | {"weight_block_size": list(block)}
    np.testing.assert_allclose(dequantize("a", tensors, settings), scaled(weight, scales, block), rtol=1e-5)
    exponents = tensors["weight_scale_inv"] = random.integers(120, 130, scales.shape).astype(np.uint8)
    expected = scaled(weight, 2.0 ** (exponents.astype(int) - 127), block)
    np.testing.assert_allclose(dequantize("a", tensors, settings), expected, rtol=1e-5)


def test_zero_points_of_int8():
    random = np.random.default_rng(0)
    weight, zeros = random.integers(-128, 128, (2, OUTS, INS)).astype(np.int8)
    scales = random.random((OUTS, 1)).astype(np.float32)
    tensors = {"weight": weight, "weight_zero_point": zeros[:, :1], "weight_scale": scales}
    expected = (weight.astype(int) - zeros[:, :1]) * scales
    np.testing.assert_allclose(dequantize("a", tensors, COMPRESSED), expected, rtol=1e-5)


@pytest.mark.parametrize("case", ["gptq, 3 bits", "awq", "packed"])
def test_memory(case, monkeypatch):
    monkeypatch.undo()
    quantize, settings = PUBLISHED[case]
    tensors = arrays(quantize(torch.randn(2048, 2048))[0])
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    tracemalloc.start()
    weight = dequantize("a", tensors, settings)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * weight.nbytes


def transformed(*places):
    schemes = {place: {"type": "hadamard", "apply": [{"targets": ["down"], "location": place}]} for place in places}
    return {"transform_config": {"config_groups": schemes}}


@pytest.mark.parametrize(("tensors", "settings", "stated"), [
    ({}, AWQ | {"version": "gemv"}, "AWQ weights of version gemv are not supported"),
    ({}, AWQ | {"bits": 8}, "AWQ weights of 8 bits are not supported"),
    ({}, GPTQ | {"checkpoint_format": "marlin"}, "GPTQ weights in the format marlin are not supported"),
    ({}, COMPRESSED | {"config_groups": {"a": {"format": "nvfp4-pack-quantized"}}}, "as nvfp4-pack-quantized are not"),
    ({}, COMPRESSED | {"sparsity_config": {"format": "sparse-24"}}, "as a sparse layout are not"),
    ({}, COMPRESSED | transformed("weight_input", "input", "q_attn"), "need transforms of input, q_attn at run time"),
    ({"weight": (8, 8)}, COMPRESSED | transformed("weight_input", "weight_output"), "'weight_scale'"),  # as any other
    ({"weight": (8, 8)}, FP8, r"quantized tensors of layer\.weight do not have the layout .* 'weight_scale'"),
    ({"weight": (64, 64), "weight_scale_inv": (2, 2)}, FP8 | {"weight_block_size": [48, 20]}, "match blocks of 20"),
    ({"weight": (300, 64), "weight_scale_inv": (2, 1)}, FP8, "2 scales for 300 weights do not match blocks of 128"),
    ({"qweight": (8, 16), "qzeros": (4, 2)}, GPTQ, "'scales'"),
    ({"qweight": (8, 16), "qzeros": (4, 2), "scales": (4, 8)}, GPTQ, "8 scales for 16 weights"),
    ({"qweight": (8, 16), "qzeros": (4, 1), "scales": (4, 16)}, GPTQ, "8 scales for 16 weights"),
    ({"qweight": (8, 16), "qzeros": (4, 2), "scales": (4, 16), "g_idx": (72,)}, GPTQ, "do not have the layout"),
    ({"weight_packed": (8, 0), "weight_shape": (2,), "weight_scale": (8, 1)}, COMPRESSED, "do not have the layout"),
])  # fmt: skip
def test_unsupported_layouts_and_wrong_tensors_are_refused(tensors, settings, stated):
    filled = {name: np.zeros(shape, np.int32 if name.startswith(("q", "weight_packed", "g_")) else np.float32)
              for name, shape in tensors.items()}  # fmt: skip
    if "weight_shape" in filled:
        filled["weight_shape"] = np.array([8, 8])
    with pytest.raises(ConfigError, match=stated):
        dequantize("layer.weight", filled, settings)
