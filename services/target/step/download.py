"""Downloads a step's results to the host: one transfer into pinned memory, with an event of its own.

A reader waits for the transfer alone, not for work that is queued behind it, such as the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Download:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: of one device, with elements of 4 or 8 bytes. On the CPU they are returned as they are."""
        self._arrived: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if not tensors or tensors[0].device.type == "cpu":
            return
        words = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
        host = (words[0] if len(words) == 1 else torch.cat(words)).to("cpu", non_blocking=True)
        parts = host.split([len(part) for part in words])
        self._tensors = [
            part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
        ]
        if tensors[0].device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Tensor]:
        """The tensors on the host, in order and of the same shapes and dtypes. Waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._tensors
