"""Uploads a step's small arrays to the device: one asynchronous transfer from pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 16  # bytes


def upload(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on a device, in order and of the same shapes and dtypes.

    On the CPU they share the arrays' memory. Elsewhere they are views of one buffer; PyTorch's allocators keep both of
    its copies until the transfer and all work queued behind it have ended.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = offsets(arrays)
    if starts[-1]:
        staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        stage(arrays, starts, staging.numpy())
        buffer = staging.to(device, non_blocking=True)
    else:
        buffer = torch.empty(0, dtype=torch.uint8, device=device)
    return [view(buffer, start, array) for start, array in zip(starts, arrays, strict=False)]


class UploadBatch:
    """Collects arrays of several callers, which are uploaded in one transfer."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.generic]] = []
        self._tensors: list[Tensor] = []

    def add(self, arrays: Sequence[NDArray[np.generic]]) -> Callable[[], list[Tensor]]:
        """Add arrays. Returns a function that gives their tensors after `send`."""
        part = slice(len(self._arrays), len(self._arrays) + len(arrays))
        self._arrays += arrays
        return lambda: self._tensors[part]

    def send(self, device: torch.device) -> None:
        """Start the transfer."""
        if self._arrays:
            self._tensors = upload(self._arrays, device)


def use_device(device: torch.device) -> None:
    """Make a device the current one of this thread, on which its kernels are launched."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def offsets(arrays: Sequence[NDArray[np.generic]]) -> list[int]:
    """Offset of each array in a buffer, in bytes, and then the buffer's size."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNED) * _ALIGNED)
    return starts


def stage(arrays: Sequence[NDArray[np.generic]], starts: Sequence[int], buffer: NDArray[np.uint8]) -> None:
    """Copy arrays to their offsets in a buffer of bytes."""
    for start, array in zip(starts, arrays, strict=False):
        buffer[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)


def view(buffer: Tensor, start: int, like: NDArray[np.generic]) -> Tensor:
    """The part of a buffer of bytes that holds an array."""
    dtype = torch.from_numpy(like[:0]).dtype
    return buffer[start : start + like.nbytes].view(dtype).view(like.shape)


class DeviceArrays:
    """Device arrays at fixed addresses, of lengths up to a limit; filled in one transfer.

    tensors: one for each array, as long as its limit. The content behind the part that was filled last is undefined.
    """

    def __init__(self, limits: Sequence[NDArray[np.generic]], device: torch.device) -> None:
        """limits: arrays of the largest sizes; their content is uploaded."""
        self._starts = offsets(limits)
        self._staging = torch.zeros(self._starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._buffer = torch.zeros(self._starts[-1], dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.tensors = [view(self._buffer, start, array) for start, array in zip(self._starts, limits, strict=False)]
        self.fill(limits)

    def fill(self, arrays: Sequence[NDArray[np.generic]]) -> None:
        """Upload arrays, in the order of the limits. Of the last one, only its own length is transferred."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous transfer, which ended long ago
        stage(arrays, self._starts, self._staging.numpy())
        end = self._starts[-2] + arrays[-1].nbytes
        self._buffer[:end].copy_(self._staging[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
