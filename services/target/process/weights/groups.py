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
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch

from outrider.errors import ConfigError
from services.target.model.loading.updates import TakenTensors, check_shapes, take
from services.target.process.weights.group import Announced, TrainerGroup
from services.target.process.weights.incoming import max_update_bytes
from services.target.process.weights.member import Membership

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Broadcast = Callable[[bytes], None]  # sends what a group does to the other ranks; in the engine thread


class JobThread:
    """A daemon thread that does one job after the other: a job may wait for a trainer that never comes, and neither
    other work nor the end of the process waits with it.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, work: Callable[[], Result]) -> Future[Result]:
        """Do work behind the jobs before it."""
        future: Future[Result] = Future()
        self._jobs.put((future, work))
        return future

    def _run(self) -> None:
        while True:
            future, work = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)


class TrainerGroups:
    """Groups by name. `join`, `leave` and `receive` are done in the order of their calls, which is that of `announce`
    on the other ranks.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        device: torch.device,
        timeout: float,
        broadcast: Broadcast | None = None,
    ) -> None:
        """shapes: of the model's tensors; tied: second names of some. timeout: as of TrainerGroup.

        broadcast: None without other ranks
        """
        self._shapes, self._tied, self._device, self._timeout = shapes, tied, device, timeout
        self._broadcast = broadcast
        self._groups: dict[str, TrainerGroup] = {}  # changed by jobs alone
        self._jobs = JobThread("groups")

    def announce(self, what: str, **details: Any) -> None:
        """In the engine thread, before `join`, `receive` and `leave`: let the other ranks do the same."""
        if self._broadcast is not None:
            self._broadcast(json.dumps({"what": what, "timeout": self._timeout, **details}).encode())

    def join(self, membership: Membership) -> Future[None]:
        """Join a group, in place of an earlier one of its name. The future raises ConfigError."""

        def work() -> None:
            if (former := self._groups.pop(membership.name, None)) is not None:
                former.leave()
            self._groups[membership.name] = TrainerGroup(membership, self._device, self._timeout)

        return self._jobs.do(work)

    def leave(self, name: str) -> Future[None]:
        """Leave a group. The future raises ConfigError for an unknown one."""

        def work() -> None:
            self._find(name)
            self._groups.pop(name).leave()

        return self._jobs.do(work)

    def check(self, announced: Sequence[Announced]) -> None:
        """Raise ConfigError for tensors that cannot be received, before `announce`: then no rank waits for them."""
        limit = max_update_bytes(self._shapes, self._tied)
        if sum(one.nbytes for one in announced) > limit:
            raise ConfigError(f"the tensors have more than {limit} bytes, which all weights of this model need at most")

    def receive(self, name: str, announced: Sequence[Announced], *, flattened: bool = False) -> Future[TakenTensors]:
        """The checked tensors that the trainer broadcasts. The future raises ConfigError; a group in which one did not
        arrive is left.

        Tensors that do not fit the model are received, too, so that the trainer can go on and read the error.
        """
        return self._jobs.do(lambda: self._receive(name, announced, flattened=flattened))

    def _receive(self, name: str, announced: Sequence[Announced], *, flattened: bool) -> TakenTensors:
        group = self._find(name)
        problem: ConfigError | None = None
        try:
            check_shapes({one.name: (one.torch_dtype, one.shape) for one in announced}, self._shapes, self._tied)
        except ConfigError as error:
            problem = error
        coming = group.receive(announced, flattened=flattened)
        try:
            arrived = {tensor_name: tensor for tensor_name, tensor in coming if problem is None}
        except ConfigError as error:
            self._groups.pop(name).leave()
            error.message += "; the group is left, so make it anew"
            raise
        if problem is not None:
            raise problem
        return take(arrived, self._shapes, self._tied)

    def _find(self, name: str) -> TrainerGroup:
        if name not in self._groups:
            raise ConfigError(f"no process group {name} was joined; call /init_weights_update_group first")
        return self._groups[name]


class OtherRank:
    """A rank other than 0 in trainers' groups: it does what rank 0 announces, and drops what arrives."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._groups: dict[str, TrainerGroup] = {}
        self._jobs = JobThread("groups")

    def take(self, message: bytes) -> None:
        """Do what `TrainerGroups.announce` sends, later."""

        def work() -> None:
            try:
                self._do(**json.loads(message))
            except ConfigError as error:  # rank 0 reports the same
                log.warning("%s", error.message)

        self._jobs.do(work)

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
