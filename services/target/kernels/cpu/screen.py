"""A narrow copy of a head, from which most tokens are known to lose; see csrc/screen.h.

The few that may win are multiplied with the head itself, so a draw says what it said without, and reads half as much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.target.kernels.cpu.weights import Format, PackedWeight, quantize_int8

_PANEL = 32  # outputs
_AT_ONCE = 4096  # outputs, so that no copy of a whole head is made
_ROUNDED = 2.0**-23  # of a product's length: what float32 may round of it, for each input


class Screen:
    """weight: in int8. errors, sizes: [panels * 32] float32, of each output the distance to the head's, and length."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self.weight = PackedWeight(outputs, inputs, Format.INT8)
        self.errors = torch.zeros(-(-outputs // _PANEL) * _PANEL)
        self.sizes = torch.zeros_like(self.errors)

    def fill(self, outputs: Tensor, weight: Tensor) -> None:
        """Copy some of the outputs. outputs: [n] int64, which; weight: [n, inputs], as the head multiplies it."""
        for some, part in zip(outputs.split(_AT_ONCE), weight.split(_AT_ONCE), strict=True):
            wide = part.detach().to("cpu", torch.float32)
            values, scales = quantize_int8(wide)
            narrow = values.float() * scales[:, None]
            rounded = _ROUNDED * wide.shape[1] * torch.maximum(wide.norm(dim=1), narrow.norm(dim=1))
            self.errors[some] = (wide - narrow).norm(dim=1) + 2 * rounded
            self.sizes[some] = narrow.norm(dim=1)
            self.weight.fill(some, wide)
