"""Linear layers with packed weights on the CPU, for models that run module by module.

`NativeLinear` uses our kernel, `PackedLinear` oneDNN's, on machines without ours. With both, a row has the same bits
however many rows are computed together (oneDNN: in float32 only), which nn.Linear does not guarantee.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import Format, PackedWeight, packed
from services.target.kernels.cpu.pool import shared_pool
from services.target.model.parallel.exchange import keep_hooks

_FEW_ROWS = 16  # rows that one thread computes before other threads have woken up
# The number of rows for which oneDNN chooses the layout. A large number costs single rows nothing; 1 slows many rows.
_ROWS = 64


class PackedLinear(nn.Module):
    """An nn.Linear with a weight packed by oneDNN; for inference on the CPU only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    @property
    def weight(self) -> Tensor:
        """The weight as nn.Linear has it, [out_features, in_features]; unpacked at every call."""
        return self._packed.to_dense()

    def replace_weight(self, weight: Tensor) -> None:
        """Pack another weight, [out_features, in_features] of any float dtype, in place of this one."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._packed.dtype), _ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]. Returns [..., out_features]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


class NativeLinear(nn.Module):
    """An nn.Linear on our own kernel, in any of its number formats; for inference on the CPU only."""

    def __init__(self, linear: nn.Linear, number_format: Format, threads: int | None = None) -> None:
        """threads: for more than a few rows; fewer rows then use one. By default PyTorch's number for any rows."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._dtype = linear.weight.dtype
        self._packed = packed(linear.weight, number_format)
        self._pool = self._small_pool = shared_pool()
        if threads is not None:
            self._pool, self._small_pool = shared_pool(threads), shared_pool(1)

    @property
    def weight(self) -> Tensor:
        """The weight as nn.Linear has it, [out_features, in_features]; multiplied out at every call."""
        with torch.inference_mode():
            return self._multiply(torch.eye(self.in_features, dtype=self._dtype), None).t().contiguous()

    def replace_weight(self, weight: Tensor) -> None:
        """Lay out another weight, [out_features, in_features] of any float dtype, in place of this one."""
        self._packed.fill(torch.arange(self.out_features), weight.to(self._dtype))

    @property
    def laid_out(self) -> tuple[PackedWeight, Tensor | None]:
        """Weight and bias (float32), as other kernels take them."""
        return self._packed, None if self.bias is None else self.bias.float()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features], float32 or bfloat16. Returns [..., out_features]."""
        return self._multiply(x, None if self.bias is None else self.bias.float())

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.numel() // self.in_features
        if rows:
            pool = self._pool if rows > _FEW_ROWS else self._small_pool
            library.load().outrider_linear(
                pool.handle, self._packed.handle, None if bias is None else bias.data_ptr(),
                x.data_ptr(), y.data_ptr(), rows, x.dtype == torch.bfloat16,
            )  # fmt: skip
        return y


def pack(module: Any, number_format: Format | None = None) -> int:
    """Pack every linear layer of a model, in place. Returns their number.

    number_format: of the weights; None: the module's own. Plain weights are freed one by one, except those shared with
    other modules, such as an embedding.
    """
    count = 0
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            made = laid_out(child, number_format if child is not head else head_format(number_format))
            if made is not child:
                keep_hooks(child, made)
                setattr(parent, name, made)
                count += 1
    return count


def head_format(number_format: Format | None) -> Format | None:
    """The LM head's format for a format of the other layers: int8 instead of int4, which is too coarse for logits."""
    return Format.INT8 if number_format == Format.INT4 else number_format


def plain_format(dtype: torch.dtype) -> Format | None:
    """The kernels' format of a dtype; None if they do not support it."""
    return {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}.get(dtype)


def laid_out(linear: nn.Linear, number_format: Format | None = None, threads: int | None = None) -> nn.Module:
    """The layer on the best kernel for its weight, or the layer itself if there is none.

    number_format: as in `pack`; threads: as in NativeLinear
    """
    plain = plain_format(linear.weight.dtype)
    if plain is None or linear.weight.device.type != "cpu":
        return linear
    if library.available():
        return NativeLinear(linear, plain if number_format is None else number_format, threads)
    narrow = linear.weight.dtype == torch.bfloat16
    if not torch.backends.mkldnn.is_available() or (narrow and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return linear
    return PackedLinear(linear)
