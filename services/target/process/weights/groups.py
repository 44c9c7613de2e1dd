"""The trainers' process groups of a target: joined, received from, and left, on all of its tensor-parallel ranks.

Every rank takes a place in the group, because a broadcast needs all members. Rank 0 keeps what arrives, and sends it to
the others as any other update (ranks/updates.py), so that all ranks take the weights or none does; the others drop it.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.errors import ConfigError
from services.target.model.loading.updates import TakenTensors, check_shapes, take
from services.target.process.weights.group import Announced, Membership, TrainerGroup
from services.target.process.weights.incoming import max_update_bytes

log = logging.getLogger(__name__)

Tell = Callable[[bytes], None]  # sends what a group does to the other ranks; in the engine thread


class TrainerGroups:
    """Groups by name. Methods that wait for the trainer are called in threads of their own."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        device: torch.device,
        timeout: float,
        tell: Tell | None = None,
    ) -> None:
        """shapes: of the model's tensors; tied: second names of some. timeout: as of TrainerGroup.

        tell: None without other ranks
        """
        self._shapes, self._tied, self._device, self._timeout, self._tell = shapes, tied, device, timeout, tell
        self._groups: dict[str, TrainerGroup] = {}
        self._lock = threading.Lock()  # of the groups, because a trainer may come again while its group is being joined

    def announce(self, what: str, **details: Any) -> None:
        """In the engine thread, before `join`, `receive` and `leave`: let the other ranks do the same."""
        if self._tell is not None:
            self._tell(json.dumps({"what": what, "timeout": self._timeout, **details}).encode())

    def join(self, membership: Membership) -> None:
        """Join a group, in place of an earlier one of its name. Raises ConfigError."""
        with self._lock:
            if (former := self._groups.pop(membership.name, None)) is not None:
                former.leave()
            self._groups[membership.name] = TrainerGroup(membership, self._device, self._timeout)

    def leave(self, name: str) -> None:
        """Leave a group. Raises ConfigError for an unknown one."""
        with self._lock:
            self._find(name)
            self._groups.pop(name).leave()

    def receive(self, name: str, announced: Sequence[Announced], *, flattened: bool = False) -> TakenTensors:
        """The tensors that the trainer broadcasts. Raises ConfigError; a group in which one did not arrive is left.

        Tensors that do not fit the model are received, too, so that the trainer can go on and read the error.
        """
        with self._lock:
            group = self._find(name)
            limit = max_update_bytes(self._shapes, self._tied)
            if sum(one.nbytes for one in announced) > limit:
                raise ConfigError(
                    f"the tensors have more than {limit} bytes, which all weights of this model need at most"
                )
            problem: ConfigError | None = None
            try:
                check_shapes({one.name: (one.torch_dtype, one.shape) for one in announced}, self._shapes, self._tied)
            except ConfigError as error:
                problem = error
            coming = group.receive(announced, flattened=flattened)
            try:
                arrived = {tensor_name: tensor for tensor_name, tensor in coming if problem is None}
            except ConfigError:
                self._groups.pop(name).leave()
                raise
            if problem is not None:
                raise problem
            return take(arrived, self._shapes, self._tied)

    def _find(self, name: str) -> TrainerGroup:
        if name not in self._groups:
            raise ConfigError(f"no process group {name} was joined; call /init_weights_update_group first")
        return self._groups[name]


class OtherRank:
    """A rank other than 0 in trainers' groups: a thread that does what rank 0 announces, and drops what arrives."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._groups: dict[str, TrainerGroup] = {}
        self._jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="groups", daemon=True).start()

    def take(self, message: bytes) -> None:
        """Do what `TrainerGroups.announce` sends, later."""
        self._jobs.put(json.loads(message))

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                self._do(**job)
            except ConfigError as error:  # rank 0 reports the same
                log.warning("%s", error.message)

    def _do(
        self,
        what: str,
        timeout: float,
        name: str = "",
        membership: Mapping[str, Any] | None = None,
        announced: Sequence[tuple[str, str, Sequence[int]]] = (),
        flattened: bool = False,
    ) -> None:
        if membership is not None:
            name = membership["name"]
        if what in ("join", "leave") and (former := self._groups.pop(name, None)) is not None:
            former.leave()
        if membership is not None:
            first = Membership(**membership)
            self._groups[name] = TrainerGroup(replace(first, rank=first.rank + self._rank), self._device, timeout)
        if what == "receive" and name in self._groups:
            tensors = [Announced(one, dtype, tuple(shape)) for one, dtype, shape in announced]
            try:
                for _ in self._groups[name].receive(tensors, flattened=flattened):
                    pass
            except ConfigError:
                self._groups.pop(name).leave()
                raise
