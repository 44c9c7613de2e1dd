"""From the tensors of published quantized formats to plain weights.

Each format stores a linear layer's weight W [out, in] as several tensors, named behind the layer's name; its function
takes them by name and gives W in float32. In all of them W = (stored value - zero point) * scale, with a scale for
every group of neighbouring inputs, every row, every block, or for all; they differ in how integers are packed.

    fp8                 weight float8 [out, in]; weight_scale_inv [row blocks, column blocks] or one number
    gptq                qweight int32, packed along in; qzeros packed along out; scales [groups, out]; g_idx [in]
    awq                 qweight int32 [in, .], packed along out in its own order; qzeros alike; scales [groups, out]
    compressed-tensors  weight_packed int32 [out, .], weight_shape; or weight int8 or float8; weight_scale
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_WORD = 32  # bits
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where column i of eight lies in its word


class UnknownLayout(ValueError):
    """Tensors that are not laid out as their format says."""


Unpack = Callable[[Mapping[str, Tensor]], Tensor]


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned integers of some bits, packed densely from each word's lowest bit on.

    words: [rows, n] int32. Returns the first `count` of each row, [rows, count] int32.
    """
    mask = (1 << bits) - 1
    if _WORD % bits == 0:  # no number lies in two words
        shifts = torch.arange(0, _WORD, bits, dtype=torch.int32, device=words.device)
        return ((words[:, :, None] >> shifts) & mask).flatten(1)[:, :count]
    first = torch.arange(count, device=words.device) * bits
    word, shift = first // _WORD, first % _WORD
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    pairs = wide[:, word] | (wide[:, word + 1] << _WORD)  # 63 bits of it may be used: shift + bits is at most 39
    return ((pairs >> shift) & mask).int()


def fp8(settings: Mapping[str, Any]) -> Unpack:
    """DeepSeek's format. settings: weight_block_size [rows, columns] or None."""
    block = settings.get("weight_block_size")

    def unpack(parts: Mapping[str, Tensor]) -> Tensor:
        return _scaled(parts["weight"].float(), parts["weight_scale_inv"], block)

    return unpack


def gptq(settings: Mapping[str, Any]) -> Unpack:
    """GPTQ's format. settings: bits; checkpoint_format: gptq stores zero points less one, gptq_v2 as they are."""
    bits = int(settings["bits"])
    less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def unpack(parts: Mapping[str, Tensor]) -> Tensor:
        scales = parts["scales"].float()  # [groups, out]
        groups, outs = scales.shape
        ins = len(parts["g_idx"]) if "g_idx" in parts else parts["qweight"].shape[0] * _WORD // bits
        values = unpack_words(parts["qweight"].t(), bits, ins)  # [out, in]
        zeros = (unpack_words(parts["qzeros"], bits, outs) + less) & ((1 << bits) - 1)
        group = parts.get("g_idx")
        if group is None or torch.equal(group.long(), torch.arange(ins, device=group.device) * groups // ins):
            return _by_groups(values, scales.t(), zeros.t())
        return (values - zeros.t()[:, group.long()]) * scales.t()[:, group.long()]

    return unpack


def awq(settings: Mapping[str, Any]) -> Unpack:
    """AWQ's format in its GEMM version. settings: bits, which is 4."""
    bits = int(settings.get("bits", settings.get("w_bit", 4)))

    def columns(words: Tensor) -> Tensor:
        values = unpack_words(words, bits, words.shape[1] * _WORD // bits)
        return values.unflatten(1, (-1, len(_AWQ_ORDER)))[:, :, list(_AWQ_ORDER)].flatten(1)

    def unpack(parts: Mapping[str, Tensor]) -> Tensor:
        values, zeros, scales = columns(parts["qweight"]), columns(parts["qzeros"]), parts["scales"].float()
        return _by_groups(values.t(), scales.t(), zeros.t())

    return unpack


def compressed_tensors(settings: Mapping[str, Any]) -> Unpack:
    """The formats pack-quantized, int-quantized and float-quantized. settings: config_groups."""
    schemes = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    block = next((scheme["block_structure"] for scheme in schemes if scheme.get("block_structure")), None)

    def unpack(parts: Mapping[str, Tensor]) -> Tensor:
        scale, zeros, group = parts["weight_scale"], parts.get("weight_zero_point"), parts.get("weight_g_idx")
        if "weight_packed" in parts:
            outs, ins = (int(size) for size in parts["weight_shape"])
            bits = parts["weight_packed"].shape[1] * _WORD // ins
            offset = 1 << (bits - 1)
            values = unpack_words(parts["weight_packed"], bits, ins) - offset
            if zeros is not None and zeros.dtype == torch.int32:
                zeros = unpack_words(zeros.t(), bits, outs).t() - offset
        else:
            values = parts["weight"]
        values = values.float()
        if group is not None and int(group.min()) >= 0:  # inputs in the order of their groups, not of their places
            scale = scale[:, group.long()]
            zeros = zeros if zeros is None else zeros[:, group.long()]
        return _scaled(values, scale, block, zeros)

    return unpack


def _by_groups(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """(values - zeros) * scales. values: [out, in] integers; scales, zeros: [out, groups], of neighbouring inputs."""
    grouped = values.float().unflatten(1, (scales.shape[1], -1))
    return grouped.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).flatten(1)


def _scaled(values: Tensor, scale: Tensor, block: Any, zeros: Tensor | None = None) -> Tensor:
    """(values - zeros) * scale, where each scale and zero is for a block. values: [out, in] float32; scale: any shape
    of [blocks of out, blocks of in], [out], or one number; block: (rows, columns), where they do not divide evenly."""
    scale = _exponents(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()
    if zeros is not None:
        values = values - _spread(zeros.float(), values, block)
    return values * _spread(scale, values, block)


def _spread(scale: Tensor, values: Tensor, block: Any) -> Tensor:
    """One number of `scale` for each of `values`, or for each of its rows."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    scale = scale if scale.ndim == 2 else scale.reshape(-1, 1)
    for dim in (0, 1):
        size, blocks = values.shape[dim], scale.shape[dim]
        if blocks in (1, size):
            continue
        length = int(block[dim]) if block else size // blocks
        if -(-size // length) != blocks:
            raise UnknownLayout(f"{blocks} scales for {size} weights, which are not blocks of {length}")
        scale = scale.repeat_interleave(length, dim).narrow(dim, 0, size)
    return scale


def _exponents(scale: Tensor) -> Tensor:
    """Scales that are stored as the exponent of a power of two, with a bias of 127."""
    return torch.exp2(scale.view(torch.uint8).float() - 127.0)
