"""A place in a trainer's process group of `torch.distributed`: joining, receiving, leaving.

The group is made as SGLang and slime make it: the trainer is rank 0 and hosts the store. Every wait is bounded, because
the trainer may never come, or die.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_FIRST_POLL, _LONGEST_POLL = 1e-4, 0.02  # seconds between two looks at a broadcast
_SOURCE_FILE = re.compile(r"^\[[^]]*\] ")
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


class Member:
    """This process as a member of a group. Errors are those of PyTorch, and TimeoutError."""

    def __init__(self, membership: Membership, timeout: float) -> None:
        """Join. timeout: in seconds, for all members to join, and for each broadcast."""
        self._backend, self._timeout = membership.backend, timeout
        self._group = _joined(membership, timeout)

    def receive(self, tensor: Tensor) -> None:
        """Fill a tensor with what rank 0 broadcasts."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work: Any = self._group.broadcast([tensor], options)
        deadline, pause = time.monotonic() + self._timeout, _FIRST_POLL
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(silence(self._timeout))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        work.wait()  # raises what went wrong

    def leave(self) -> None:
        """Leave the group; what is under way there ends with an error."""
        if self._backend == "nccl":  # a communicator with a dead peer cannot be closed in order
            self._group.abort()
        dist.destroy_process_group(self._group)


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


def silence(seconds: float) -> str:
    """What is wrong with a trainer that sends nothing."""
    return f"the trainer sent nothing for {seconds:.0f} s"


def reason(error: Exception) -> str:
    """The first line, without the source file that gloo puts in front, and without its advice."""
    line = _SOURCE_FILE.sub("", (str(error) or type(error).__name__).splitlines()[0])
    return line.partition(" This is typically caused by")[0]
