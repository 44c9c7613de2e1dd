"""What rank 0 sends the other ranks: messages, which are arrays of integers on the host, and tensors on the device."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

_INLINE = 2048  # numbers in the first broadcast; longer messages need a second one
_PROBLEM_BYTES = 400  # of a rank's reason; longer ones are cut


class Kind(IntEnum):
    """What a message is about."""

    CACHE = 0  # a new cache
    CAPTURE = 1  # steps are captured as CUDA graphs
    BATCH = 2  # a step
    MOVE = 3  # rows move in the cache
    STAGE = 4  # a tensor of a weight update arrives
    SETTLE = 5  # the last one has arrived: all ranks take the new weights, or none does
    END = 6  # the ranks end
    GROUP = 7  # a trainer's process group is joined, received from or left


class Channel:
    """Rank 0's broadcasts, in order. Every rank holds one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """group: of all ranks, for messages; without a timeout, because an idle engine sends none for any time."""
        self._group = group
        self._buffer = torch.zeros(_INLINE, dtype=torch.int64)

    def send(self, kind: Kind, *arrays: NDArray[np.integer]) -> None:
        """Send a message. arrays: of any integer type, one-dimensional; the receiver knows their lengths."""
        body = np.concatenate([np.array([0, kind]), *arrays]).astype(np.int64)
        body[0] = len(body)
        inline = min(len(body), _INLINE)
        self._buffer[:inline] = torch.from_numpy(body[:inline])
        dist.broadcast(self._buffer, 0, self._group)
        if len(body) > _INLINE:
            dist.broadcast(torch.from_numpy(body[_INLINE:]), 0, self._group)

    def receive(self) -> tuple[Kind, NDArray[np.int64]]:
        """Receive rank 0's next message: its kind, and the concatenated arrays."""
        dist.broadcast(self._buffer, 0, self._group)
        body = self._buffer[: int(self._buffer[0])].numpy().copy()
        missing = int(self._buffer[0]) - len(body)
        if missing > 0:
            rest = torch.empty(missing, dtype=torch.int64)
            dist.broadcast(rest, 0, self._group)
            body = np.concatenate([body, rest.numpy()])
        return Kind(int(body[1])), body[2:]

    def share(self, tensor: Tensor) -> None:
        """Fill a tensor with rank 0's, on the device: all ranks call it with the same shape and dtype. Contiguous.

        On CUDA the host does not wait for it.
        """
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0)

    def first_problem(self, problem: str) -> str:
        """The problem of the first rank that has one, with its number; empty if none has. All ranks call it."""
        mine = torch.zeros(_PROBLEM_BYTES, dtype=torch.uint8)
        text = problem.encode()[:_PROBLEM_BYTES]
        mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(every, mine, self._group)
        for rank, found in enumerate(every):
            if found.any():
                return f"rank {rank}: {bytes(found.tolist()).rstrip(bytes(1)).decode(errors='replace')}"
        return ""
