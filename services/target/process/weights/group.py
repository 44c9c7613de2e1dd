"""A trainer's process group, over which it broadcasts weights: joining, receiving, leaving.

The group is one of `torch.distributed` beside the target's own, made as SGLang and slime make it: the trainer is rank 0
and hosts the store; gloo carries tensors to targets on CPUs, NCCL to those on CUDA. Every wait is bounded, because the
trainer may never come, or die.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from outrider.errors import ConfigError

log = logging.getLogger(__name__)

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip
_OTHERS = {  # received, and then refused, so that the trainer does not wait in its broadcast
    str(one).removeprefix("torch."): one
    for one in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn,
                torch.float8_e5m2)
}  # fmt: skip
_FIRST_POLL, _LONGEST_POLL = 1e-4, 0.02  # seconds between two looks at a broadcast
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_SOURCE_FILE = re.compile(r"^\[[^]]*\] ")
_MARK = 16  # random bytes on either side of the end of what is to arrive
_GRACE = 600.0  # seconds beyond the timeout, before PyTorch itself would end the process for a silent peer


@dataclass(frozen=True)
class Membership:
    """A place in a trainer's group. name: of the group; host, port: of the trainer's store."""

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: str


@dataclass(frozen=True)
class Announced:
    """A tensor that the trainer is about to broadcast."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises ConfigError."""
        found = DTYPES.get(self.dtype, _OTHERS.get(self.dtype))
        if found is None:
            raise ConfigError(f"{self.name} is of type {self.dtype}; send one of {', '.join(DTYPES)}")
        return found

    @property
    def nbytes(self) -> int:
        """Size, in bytes. Raises ConfigError."""
        return self.torch_dtype.itemsize * prod(self.shape)


class TrainerGroup:
    """One process's membership in a trainer's group."""

    def __init__(self, membership: Membership, device: torch.device, timeout: float) -> None:
        """Join. timeout: in seconds, for all members to join, and for each broadcast. Raises ConfigError."""
        self.membership, self._timeout = membership, timeout
        backend = _BACKENDS.get(device.type, "gloo")
        if membership.backend != backend:
            raise ConfigError(
                f"a target on {device.type} receives weights with backend {backend}, not {membership.backend}"
            )
        self._device = device if backend == "nccl" else torch.device("cpu")
        place = f"rank {membership.rank} of {membership.world_size} in group {membership.name}"
        try:
            self._group = _joined(membership, timeout)
        except Exception as error:  # of the network, or of a name that is taken
            raise ConfigError(f"{place} could not be joined within {timeout:.0f} s: {_reason(error)}") from None
        log.info("joined as %s at %s:%d", place, membership.host, membership.port)

    def receive(
        self, announced: Sequence[Announced], limit: int, *, flattened: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors, on the host, in the order in which the trainer broadcasts them. Raises ConfigError.

        limit: bytes of the largest update. flattened: as one tensor, in which they follow one another
        """
        room = self._room_of(limit)
        if flattened:
            flat = self._broadcast(sum(one.nbytes for one in announced), torch.uint8, "the bucket", room)
            places = flat.split([one.nbytes for one in announced])
            for one, part in zip(announced, places, strict=True):
                aligned = part if part.storage_offset() % one.torch_dtype.itemsize == 0 else part.clone()
                yield one.name, aligned.view(one.torch_dtype).reshape(one.shape)
            return
        for one in announced:
            dtype = one.torch_dtype if one.dtype in DTYPES else torch.uint8  # NCCL does not know all of the others
            flat = self._broadcast(one.nbytes // dtype.itemsize, dtype, one.name, room)
            yield one.name, flat.view(one.torch_dtype).reshape(one.shape)

    def _room_of(self, limit: int) -> Tensor | None:
        """Room for a message of gloo, [bytes]; None where the size of a message must be exact.

        gloo ends the process for a message that is larger than its room. So there is room for the largest update,
        except on a rank that passes messages on: in gloo's binomial tree, to rank + 2^n above its own highest bit.
        Memory is taken as bytes arrive.
        """
        passes_on = self.membership.rank + (1 << self.membership.rank.bit_length()) < self.membership.world_size
        return None if self._device.type == "cuda" or passes_on else torch.empty(limit + _MARK, dtype=torch.uint8)

    def _broadcast(self, numbers: int, dtype: torch.dtype, name: str, room: Tensor | None) -> Tensor:
        """A tensor that rank 0 broadcasts, [numbers] on the host. room: as of `_room_of`."""
        try:
            if self._device.type == "cuda":
                tensor = torch.empty(numbers, dtype=dtype, device=self._device)
                self._receive(tensor)
                return tensor.to("cpu")
            size = numbers * dtype.itemsize
            found = torch.empty(size, dtype=torch.uint8) if room is None else room
            marked = found[max(size - _MARK, 0) : size + _MARK]  # gloo does not report how many bytes arrived
            mark = torch.tensor(list(os.urandom(len(marked))), dtype=torch.uint8)
            marked.copy_(mark)
            self._receive(found)
            inside = min(size, _MARK)
            if inside == _MARK and torch.equal(marked[:inside], mark[:inside]):
                raise ValueError(f"the trainer sent less than the {size} bytes that it announced")
            if not torch.equal(marked[inside:], mark[inside:]):
                raise ValueError(f"the trainer sent more than the {size} bytes that it announced")
            return (found if room is None else found[:size].clone()).view(dtype)
        except Exception as error:
            raise ConfigError(f"{name} did not arrive over group {self.membership.name}: {_reason(error)}") from None

    def _receive(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._wait(self._group.broadcast([tensor], options))

    def _wait(self, work: Any) -> None:
        deadline, pause = time.monotonic() + self._timeout, _FIRST_POLL
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the trainer sent nothing for {self._timeout:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        work.wait()  # raises what went wrong

    def leave(self) -> None:
        """Leave the group; what is under way there ends with an error."""
        try:
            if self.membership.backend == "nccl":  # a communicator with a dead peer cannot be closed in order
                self._group.abort()
            dist.destroy_process_group(self._group)
        except Exception as error:
            log.warning("group %s is left: %s", self.membership.name, error)


def _joined(membership: Membership, timeout: float) -> dist.ProcessGroup:
    """The group. Its keys in the store are those of the helper that every trainer uses, so this uses it, too."""
    seconds = timedelta(seconds=timeout)
    store = dist.TCPStore(
        membership.host.strip("[]"), membership.port, membership.world_size, is_master=False, timeout=seconds
    )
    later = timedelta(seconds=timeout + (_GRACE if membership.backend == "nccl" else 0.0))
    make: Any = distributed_c10d._new_process_group_helper
    group: dist.ProcessGroup = make(
        membership.world_size, membership.rank, [], dist.Backend(membership.backend),
        dist.PrefixStore(membership.name, store), group_name=membership.name, timeout=later,
    )[0]  # fmt: skip
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(membership.world_size)}
    return group


def _reason(error: Exception) -> str:
    """The first line, without the source file that gloo puts in front, and without its advice."""
    line = _SOURCE_FILE.sub("", (str(error) or type(error).__name__).splitlines()[0])
    return line.partition(" This is typically caused by")[0]
