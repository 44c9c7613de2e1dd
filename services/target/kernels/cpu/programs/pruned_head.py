"""A narrow copy of an LM head, which rules most tokens out before sampling; see csrc/programs/pruned_head.h.

The few tokens that may win are multiplied with the head itself, so samples are unchanged while a step reads half as
many bytes of the head.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from services.target.kernels.cpu.matrices import packed_file
from services.target.kernels.cpu.matrices.weights import Format, PackedWeight, quantize_int8

_PANEL = 32  # outputs
_AT_ONCE = 4096  # outputs converted at a time, so that no second copy of a whole head exists
_ROUNDED = 2.0**-23  # bound of a product's float32 rounding error, relative to its length, for each input


class PrunedHead:
    """weight: the int8 copy. error_norms, narrow_norms: [panels * 32] float32, norms of its error and of its rows.

    restored: the norms were read from a file of packed weights
    """

    def __init__(self, outputs: int, inputs: int) -> None:
        self.weight = PackedWeight(outputs, inputs, Format.INT8)
        self.error_norms = torch.zeros(-(-outputs // _PANEL) * _PANEL)
        self.narrow_norms = torch.zeros_like(self.error_norms)
        self.restored = self._asked = False

    def memory(self) -> list[packed_file.Part]:
        """As of packed_file.Restorable: of the norms."""
        return [(norm.data_ptr(), norm.nbytes) for norm in (self.error_norms, self.narrow_norms)]

    def restore(self) -> bool:
        """Take the head from the file of packed weights, if there is one. True if the file has it."""
        if not self._asked and (file := packed_file.active()) is not None:
            self._asked = True
            name = f"norms of a head, {self.weight.outputs} x {self.weight.inputs}"
            if (addresses := file.take(self, name)) is not None:
                for address, (own, size) in zip(addresses, self.memory(), strict=True):
                    ctypes.memmove(own, address, size)
                self.restored = True
        return self.weight.restore() and self.restored

    def fill(self, outputs: Tensor, weight: Tensor) -> None:
        """Copy some outputs. outputs: [n] int64, their indices; weight: [n, inputs], in the head's own format."""
        if self.restore():
            return
        with packed_file.computing():
            self._fill(outputs, weight)

    def _fill(self, outputs: Tensor, weight: Tensor) -> None:
        for some, part in zip(outputs.split(_AT_ONCE), weight.split(_AT_ONCE), strict=True):
            wide = part.detach().to("cpu", torch.float32)
            values, scales = quantize_int8(wide)
            narrow = values.float() * scales[:, None]
            rounded = _ROUNDED * wide.shape[1] * torch.maximum(wide.norm(dim=1), narrow.norm(dim=1))
            self.error_norms[some] = (wide - narrow).norm(dim=1) + 2 * rounded
            self.narrow_norms[some] = narrow.norm(dim=1)
            self.weight.fill_quantized(some, values, scales)
