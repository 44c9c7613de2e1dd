"""Small arrays of a step on their way to the device: in one transfer, from pinned memory, which nothing waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 16  # bytes


def upload(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on a device, in order and of the same shapes and dtypes.

    On the CPU they are the arrays themselves. Elsewhere they are views of one buffer; PyTorch's allocators keep both of
    its copies until the transfer and all work queued behind it are over.
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
    """Arrays of several parties that go to a device together."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.generic]] = []
        self._tensors: list[Tensor] = []

    def add(self, arrays: Sequence[NDArray[np.generic]]) -> Callable[[], list[Tensor]]:
        """Put arrays in. Returns what hands out their tensors once the parcel was sent."""
        part = slice(len(self._arrays), len(self._arrays) + len(arrays))
        self._arrays += arrays
        return lambda: self._tensors[part]

    def send(self, device: torch.device) -> None:
        """Start the transfer."""
        if self._arrays:
            self._tensors = upload(self._arrays, device)


def use_device(device: torch.device) -> None:
    """Make a device the one of this thread, as kernels are launched where the thread is."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def offsets(arrays: Sequence[NDArray[np.generic]]) -> list[int]:
    """Where each array begins in a buffer of bytes, and at last the buffer's size."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNED) * _ALIGNED)
    return starts


def stage(arrays: Sequence[NDArray[np.generic]], starts: Sequence[int], buffer: NDArray[np.uint8]) -> None:
    """Copy arrays to where they begin in a buffer of bytes."""
    for start, array in zip(starts, arrays, strict=False):
        buffer[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)


def view(buffer: Tensor, start: int, like: NDArray[np.generic]) -> Tensor:
    """The part of a buffer of bytes that holds an array."""
    dtype = torch.from_numpy(like[:0]).dtype
    return buffer[start : start + like.nbytes].view(dtype).view(like.shape)


class Slab:
    """Fixed places on a device for arrays that vary in length up to a limit; filled in one transfer.

    tensors: one an array, as long as its limit. What lies behind the part that was filled last is of no meaning.
    """

    def __init__(self, limits: Sequence[NDArray[np.generic]], device: torch.device) -> None:
        """limits: arrays as large as they may become; their content is put in place."""
        self._starts = offsets(limits)
        self._staging = torch.zeros(self._starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._buffer = torch.zeros(self._starts[-1], dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.tensors = [view(self._buffer, start, array) for start, array in zip(self._starts, limits, strict=False)]
        self.fill(limits)

    def fill(self, arrays: Sequence[NDArray[np.generic]]) -> None:
        """Put arrays in place, in the order of the limits. Only the last one's own length is transferred."""
        if self._copied is not None:
            self._copied.synchronize()  # the transfer before this one; over long ago
        stage(arrays, self._starts, self._staging.numpy())
        end = self._starts[-2] + arrays[-1].nbytes
        self._buffer[:end].copy_(self._staging[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
