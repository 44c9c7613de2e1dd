"""A trainer's process group, over which it broadcasts weights: what is announced, and what arrives.

gloo carries tensors to targets on CPUs, into a process beside the target; NCCL to those on CUDA, into the target.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from outrider.errors import ConfigError
from services.target.process.weights.member import Member, Membership, reason
from services.target.process.weights.receiver import ReceivingProcess

log = logging.getLogger(__name__)

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip
_OTHERS = {  # received, and then refused, so that the trainer does not wait in its broadcast
    str(one).removeprefix("torch."): one
    for one in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn,
                torch.float8_e5m2)
}  # fmt: skip
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_NAN = b"\xff"  # in each byte of a number of any of DTYPES


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
        self.membership, self._device = membership, device
        backend = _BACKENDS.get(device.type, "gloo")
        if membership.backend != backend:
            raise ConfigError(
                f"a target on {device.type} receives weights with backend {backend}, not {membership.backend}"
            )
        place = f"rank {membership.rank} of {membership.world_size} in group {membership.name}"
        try:
            self._member = _member(membership, timeout)
        except Exception as error:  # of the network, or of a name that is taken
            raise ConfigError(f"{place} could not be joined within {timeout:.0f} s: {reason(error)}") from None
        log.info("joined as %s at %s:%d", place, membership.host, membership.port)

    def receive(self, announced: Sequence[Announced], *, flattened: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The tensors, on the host, in the order in which the trainer broadcasts them. Raises ConfigError.

        flattened: as one tensor, in which they follow one another
        """
        if flattened:
            sizes = [one.nbytes for one in announced]
            whole = self._broadcast("the bucket", sum(sizes), torch.uint8, announced[-1].torch_dtype)
            for one, part in zip(announced, whole.split(sizes), strict=True):
                aligned = part if part.storage_offset() % one.torch_dtype.itemsize == 0 else part.clone()
                yield one.name, aligned.view(one.torch_dtype).reshape(one.shape)
            return
        for one in announced:
            dtype = one.torch_dtype
            sent = dtype if one.dtype in DTYPES else torch.uint8  # NCCL does not know all of the others
            yield one.name, self._broadcast(one.name, one.nbytes, sent, dtype).view(dtype).reshape(one.shape)

    def _broadcast(self, name: str, size: int, sent: torch.dtype, last: torch.dtype) -> Tensor:
        """What rank 0 broadcasts, [size] uint8 on the host. sent: type of the broadcast; last: of the last number."""
        try:
            if isinstance(self._member, ReceivingProcess):
                return _whole(self._member, size, last)
            tensor = torch.empty(size // sent.itemsize, dtype=sent, device=self._device)
            self._member.receive(tensor)
            return tensor.to("cpu").view(torch.uint8)
        except Exception as error:
            raise ConfigError(f"{name} did not arrive over group {self.membership.name}: {reason(error)}") from None

    def leave(self) -> None:
        """Leave the group; what is under way there ends with an error."""
        try:
            self._member.leave()
        except Exception as error:
            log.warning("group %s is left: %s", self.membership.name, error)


def _member(membership: Membership, timeout: float) -> Member | ReceivingProcess:
    return Member(membership, timeout) if membership.backend == "nccl" else ReceivingProcess(membership, timeout)


def _whole(process: ReceivingProcess, size: int, last: torch.dtype) -> Tensor:
    """A message, [size] uint8. Raises ValueError for one that is shorter, and as ReceivingProcess.

    gloo takes shorter messages, and does not report their size. So the last number is NaN until it arrives; members
    that pass messages on pass it on, too.
    """
    end = (_NAN * last.itemsize)[:size] if last in DTYPES.values() else b""
    found = process.receive(size, end)
    if end and bytes(found[-len(end) :].tolist()) == end:
        raise ValueError(f"the trainer sent less than the {size} bytes that it announced, or NaN at their end")
    return found
