"""Quantizes a tiny checkpoint into published formats, and writes beside it the plain one that it stands for.

Round-to-nearest throughout. Packing is written out bit by bit, as the formats' descriptions have it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

# weight [out, in] -> stored tensors by the name behind the layer's, and the weight that they stand for
Quantizer = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
GROUP = 16


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers [rows, n], packed along rows, lowest bits first. Returns int32 [rows, n * bits / 32]."""
    flags = (values.numpy()[..., None] >> np.arange(bits)) & 1  # [rows, n, bits]
    stream = flags.reshape(len(values), -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def _integers(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Unsigned values [out, in], scales [out, groups] and zero points [out, groups], and what they stand for."""
    grouped = weight.unflatten(1, (-1, group))
    top = 2**bits - 1
    if symmetric:
        scale = grouped.abs().amax(-1) / (2 ** (bits - 1) - 1)
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round()
    scale = scale.half().float()
    values = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, top)
    plain = (values - zero[..., None]) * scale[..., None]
    return values.flatten(1).int(), scale, zero.int(), plain.flatten(1)


def gptq(bits: int, symmetric: bool, shuffled: bool = False, v2: bool = False) -> Quantizer:
    def quantize(weight):
        order = torch.randperm(weight.shape[1]) if shuffled else torch.arange(weight.shape[1])
        values, scale, zero, plain = _integers(weight[:, order], bits, GROUP, symmetric)
        back = order.argsort()
        return {
            "qweight": _pack(values[:, back], bits).t().contiguous(),
            "qzeros": _pack(((zero if v2 else zero - 1) % 2**bits).t(), bits),
            "scales": scale.t().contiguous().half(),
            "g_idx": (torch.arange(weight.shape[1]) // GROUP)[back].int(),
        }, plain[:, back]

    return quantize


def awq(weight):
    values, scale, zero, plain = _integers(weight, 4, GROUP, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns that a word's nibbles hold, from the lowest

    def pack(columns):
        return _pack(columns.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    return {"qweight": pack(values.t()), "qzeros": pack(zero.t()), "scales": scale.t().contiguous().half()}, plain


def pack_quantized(bits: int, symmetric: bool) -> Quantizer:
    def quantize(weight):
        values, scale, zero, plain = _integers(weight, bits, GROUP, symmetric)
        tensors = {
            "weight_packed": _pack(values, bits),
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": scale,
        }
        if not symmetric:
            tensors["weight_zero_point"] = _pack(zero.t(), bits).t().contiguous()
        return tensors, plain

    return quantize


def int_quantized(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round()
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale


def float_quantized(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale.bfloat16()}, values.float() * scale.bfloat16().float()


def fp8(block: int | None, exponents: bool = False) -> Quantizer:
    """block: rows and columns that share a scale, which need not divide the weight's; or one scale for all. exponents:
    scales are powers of two, of which the exponent is stored.
    """

    def quantize(weight):
        if block is None:
            scale = weight.abs().max() / 448
            values = (weight / scale).to(torch.float8_e4m3fn)
            return {"weight": values, "weight_scale_inv": scale}, values.float() * scale
        rows, columns = weight.shape
        values, plain = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        scale = torch.empty(-(-rows // block), -(-columns // block))
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                scale[i, j] = weight[at].abs().max() / 448
                if exponents:
                    scale[i, j] = scale[i, j].log2().ceil().exp2()
                values[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
                plain[at] = values[at].float() * scale[i, j]
        stored = scale.to(torch.float8_e8m0fnu) if exponents else scale
        return {"weight": values, "weight_scale_inv": stored}, plain

    return quantize


def fp8_auto(weight):
    """As AutoFP8 writes it: a scale for all, under another name, and one for the layer's input."""
    tensors, plain = fp8(None)(weight)
    scales = {"weight_scale": tensors["weight_scale_inv"], "input_scale": torch.tensor(0.5)}
    return {"weight": tensors["weight"], **scales}, plain


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {}}}}
PUBLISHED: dict[str, tuple[Quantizer, dict[str, Any]]] = {
    "gptq, 2 bits": (gptq(2, symmetric=False), GPTQ | {"bits": 2}),
    "gptq, 3 bits": (gptq(3, symmetric=False), GPTQ | {"bits": 3}),
    "gptq, 4 bits": (gptq(4, symmetric=True), GPTQ | {"bits": 4}),
    "gptq, by activation": (gptq(4, symmetric=False, shuffled=True), GPTQ | {"bits": 4}),
    "gptq, version 2": (
        gptq(8, symmetric=False, v2=True), GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, AWQ),
    "packed": (pack_quantized(4, symmetric=True), COMPRESSED),
    "packed, zero points": (pack_quantized(4, symmetric=False), COMPRESSED),
    "int8": (int_quantized, COMPRESSED),
    "float8, a scale a row": (float_quantized, COMPRESSED),
    "float8, one scale": (fp8(None), FP8),
    "float8, blocks": (fp8(20), FP8 | {"weight_block_size": [20, 20]}),
    "float8, blocks, exponents": (fp8(20, exponents=True), FP8 | {"weight_block_size": [20, 20]}),
    "float8, default blocks": (fp8(128), FP8),
}  # fmt: skip


def write_quantized(folder: Path, plain: Path, quantize: Quantizer, config: dict[str, Any]) -> None:
    """Quantize the projections of the checkpoint in `folder`; write what it then stands for into the folder `plain`."""
    file = folder / "model.safetensors"
    stored, stands_for = {}, {}
    for name, tensor in safetensors.torch.load_file(file).items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") and not name.endswith(".bias"):
            tensors, stands_for[name] = quantize(tensor)
            stored |= {f"{layer}.{part}": each for part, each in tensors.items()}
        else:
            stored[name] = stands_for[name] = tensor
    settings = json.loads((folder / "config.json").read_text())
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    for path, tensors in ((file, stored), (plain / "model.safetensors", stands_for)):
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, path, {"format": "pt"})
