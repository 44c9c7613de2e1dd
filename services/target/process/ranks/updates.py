"""Weight updates on several ranks: every rank takes the new weights, or none does.

stage    rank 0 broadcasts one whole tensor after the other; each rank keeps its part of it in host memory
settle   the ranks exchange their problems; only if there are none, each writes what it has staged
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import ConfigError
from services.target.kernels.dispatch import Planner
from services.target.model.base import Runner
from services.target.model.weight_slots import WeightSlots
from services.target.process.ranks.channel import Channel, Kind

log = logging.getLogger(__name__)

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@runtime_checkable
class SlotRunner(Runner, Protocol):
    """A runner whose weights have slots."""

    @property
    def planner(self) -> Planner:
        """The planner of its attention."""
        ...

    def slots(self) -> WeightSlots:
        """The slots of this rank's parts."""
        ...


class StagedWeights:
    """The parts of new weights that a rank has received. problem: why it cannot take them; empty if it can."""

    def __init__(self, runner: SlotRunner) -> None:
        self._slots = runner.slots()
        self._parts: dict[str, list[Tensor]] = {}
        self.problem = ""

    def add(self, name: str, whole: Tensor) -> None:
        """Keep this rank's part of a tensor. One that has no place here is another rank's."""
        if self.problem or name not in self._slots.shapes:
            return
        try:
            self._parts[name] = [part.to("cpu", copy=True) for part in self._slots.parts(name, whole)]
        except Exception as error:  # the other ranks must receive it, of any type
            self.problem = f"{name} cannot be kept: {error}"

    def settle(self, channel: Channel) -> str:
        """Write the parts if no rank has a problem. Returns the problem that there is; every rank calls it."""
        problem = channel.first_problem(self.problem)
        if not problem:
            for name, parts in self._parts.items():
                self._slots.write_parts(name, parts)
        return problem


def update_all(tensors: Mapping[str, Tensor], runner: SlotRunner, device: torch.device, channel: Channel) -> None:
    """On rank 0: replace weights on all ranks. Raises ConfigError if one cannot take them; then none has changed."""
    staged = StagedWeights(runner)
    try:
        for name, tensor in _read(tensors, staged):
            whole = tensor.to(device).contiguous()
            channel.send(Kind.STAGE, *_described(name, whole))
            channel.share(whole)
            staged.add(name, whole)
    finally:
        channel.send(Kind.SETTLE)
    problem = staged.settle(channel)
    if problem:
        raise ConfigError(f"the weights have not changed on any rank: {problem}")


def _read(tensors: Mapping[str, Tensor], staged: StagedWeights) -> Iterator[tuple[str, Tensor]]:
    """The tensors, until one cannot be read."""
    try:
        yield from tensors.items()
    except GeneratorExit:
        raise
    except Exception as error:
        staged.problem = f"the weights cannot be read: {error}"


def receive(body: NDArray[np.int64], staged: StagedWeights, device: torch.device, channel: Channel) -> None:
    """On the other ranks: receive a tensor that rank 0 sends."""
    dtype, dims = body[:2].tolist()
    shape, name = body[2 : 2 + dims].tolist(), bytes(body[2 + dims :].astype(np.uint8)).decode()
    whole = torch.empty(shape, dtype=_DTYPES[dtype], device=device)
    channel.share(whole)
    staged.add(name, whole)


def _described(name: str, tensor: Tensor) -> list[NDArray[np.int64]]:
    numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *name.encode()]
    return [np.array(numbers, np.int64)]


def slotted(runner: Runner) -> SlotRunner:
    """The runner of a rank, whose weights have slots."""
    assert isinstance(runner, SlotRunner), "ranks run module by module, or with fused kernels"
    return runner
