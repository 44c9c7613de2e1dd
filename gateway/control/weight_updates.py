"""Updates of a model's weights. Every update goes to all targets; drafts follow.

An update that a target refuses as invalid is the caller's mistake. A target that was away misses the update, and is
unused because of its old weights until it has all new ones. Updates are serialized; otherwise two concurrent ones could
leave different weights on different targets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from gateway.control.calls import CALL_TIMEOUT, Services, cut, put_in_all, raise_first
from gateway.control.draft_weights import DraftFollower, Goal
from gateway.control.server_info import Facts
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.errors import Conflict, InvalidRequest, OutriderError
from outrider.transport.uploads import upload
from outrider.wire.v1 import common_pb2, draft_pb2, target_pb2

log = logging.getLogger(__name__)

_POLL = 0.02  # seconds between two looks at the targets
_UPDATE_TIMEOUT = 3600.0  # seconds to read or send all weights
_READY_TIMEOUT = 30.0  # seconds for targets with new weights to be used
_MAX_PARTS = 4  # of a stream by which a slow target may lag behind the others
_NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file


class UpdateResult(NamedTuple):
    """The result of an update. targets: their number. unused: addresses of those that lack weights, or are away."""

    weights: common_pb2.WeightFacts
    targets: int
    unused: list[str]


class WeightUpdates:
    """Changes the weights of all targets together."""

    def __init__(self, services: Services, facts: Facts) -> None:
        """facts: about the served model; updated with the weights."""
        self._services, self._facts = services, facts
        self._updating = asyncio.Lock()
        known = facts.target
        goal = Goal(known.weights_folder, known.shared_fingerprint, known.weight_version)
        self._follower = DraftFollower(services.orchestrator, goal)

    def prepare(self, link: TargetLink | DraftLink) -> None:
        """Make a replica take part in updates before it is used."""
        if isinstance(link, DraftLink):
            self._follower.prepare(link)
        else:
            link.update_lock = self.lock

    @property
    def version(self) -> str:
        """Version label of the weights."""
        return self._facts.target.weight_version

    async def label(self, version: str, *, abort_all_requests: bool) -> UpdateResult:
        """Change the label of the weights, which stay."""
        update = common_pb2.WeightUpdate(weight_version=version, keep_cache=True, abort_all_requests=abort_all_requests)

        async def none() -> AsyncIterator[bytes]:
            yield _NO_TENSORS

        return await self.update_from_tensors(none(), update)

    async def update_from_disk(self, folder: str, update: common_pb2.WeightUpdate) -> UpdateResult:
        """Load weights from a folder that every target can read. Raises InvalidRequest if they do not fit."""
        request = target_pb2.UpdateWeightsFromDiskRequest(folder=folder, update=update)
        result = await self._ask_all(lambda stub: stub.UpdateWeightsFromDisk(request, timeout=_UPDATE_TIMEOUT), update)
        return await self._settled(result)

    @property
    def max_update_bytes(self) -> int:
        """Largest pickle of tensors that any target reads, in bytes."""
        return max(
            (target.info.max_update_bytes for target in self._services.targets if target.info is not None), default=0
        )

    async def update_from_tensors(
        self, parts: AsyncIterator[bytes], update: common_pb2.WeightUpdate, *, pickled: bool = False
    ) -> UpdateResult:
        """Load tensors sent as one safetensors file, or as a pickle. Raises InvalidRequest if they do not fit, and
        Conflict while others are being sent, because the targets keep all of them in memory.
        """
        update.shared_tensors.extend(self._follower.shared_tensors)
        with self._one_upload():
            kind = target_pb2.TENSOR_FORMAT_PICKLE if pickled else target_pb2.TENSOR_FORMAT_UNSPECIFIED
            result = await self._send_tensors(
                parts, target_pb2.UpdateWeightsFromTensorRequest(update=update, format=kind)
            )
        return await self._settled(result)

    async def join_group(self, request: target_pb2.JoinWeightsGroupRequest) -> None:
        """Let all targets join a trainer's process group, at consecutive ranks from the request's on.

        Raises InvalidRequest if one cannot.
        """
        calls, rank = [], request.rank
        for target in self._services.some_targets():
            own = target_pb2.JoinWeightsGroupRequest.FromString(request.SerializeToString())
            own.rank = rank
            rank += max(target.info.ranks, 1) if target.info is not None else 1
            calls.append(self._services.call_target(target, partial(_join, own)))
        if rank > request.world_size:
            raise InvalidRequest(
                f"the targets take {rank - request.rank} ranks from {request.rank} on, but the group has "
                f"{request.world_size} in all",
                param="world_size",
            )
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            await asyncio.gather(*tasks)
        finally:  # the first error ends the wait: without one target the others wait in vain
            for task in tasks:
                task.cancel()

    async def leave_group(self, name: str) -> None:
        """Let all targets leave a trainer's process group. Raises InvalidRequest if one was not in it."""
        request = target_pb2.LeaveWeightsGroupRequest(group_name=name)
        await self._services.call_targets(lambda stub: stub.LeaveWeightsGroup(request, timeout=CALL_TIMEOUT))

    async def update_from_group(self, request: target_pb2.UpdateWeightsFromGroupRequest) -> UpdateResult:
        """Load tensors that a trainer broadcasts. Raises InvalidRequest if they do not fit or arrive, and Conflict
        while others are being sent.
        """
        request.update.shared_tensors.extend(self._follower.shared_tensors)
        with self._one_upload():
            result = await self._ask_all(
                lambda stub: stub.UpdateWeightsFromGroup(request, timeout=_UPDATE_TIMEOUT), request.update
            )
        return await self._settled(result)

    async def _ask_all(self, call: Callable[[Any], Awaitable[Any]], update: common_pb2.WeightUpdate) -> UpdateResult:
        """Let every target take new weights, while no other update changes them."""
        async with self.lock():
            targets = self._services.some_targets()
            calls = [self._services.call_target(target, call) for target in targets]
            return await self._finish_update(targets, await asyncio.gather(*calls, return_exceptions=True), update)

    async def _send_tensors(
        self, parts: AsyncIterator[bytes], first: target_pb2.UpdateWeightsFromTensorRequest
    ) -> UpdateResult:
        targets = self._services.some_targets()  # one that joins later lacks the first parts, so that it is unused
        queues: list[asyncio.Queue[bytes | None]] = [asyncio.Queue(_MAX_PARTS) for _ in targets]

        async def requests(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[Any]:
            yield first
            while (part := await queue.get()) is not None:
                yield target_pb2.UpdateWeightsFromTensorRequest(content=part)

        def send(queue: asyncio.Queue[bytes | None]) -> Callable[[Any], Awaitable[Any]]:
            return lambda stub: upload(stub.UpdateWeightsFromTensor, requests(queue), _UPDATE_TIMEOUT)

        tasks = [
            asyncio.create_task(self._services.call_target(target, send(queue)))
            for target, queue in zip(targets, queues, strict=True)
        ]
        try:
            async for part in cut(parts):
                await put_in_all(queues, tasks, part)
                if all(task.done() for task in tasks):
                    break  # every target has refused them, so the rest of the body need not arrive
            async with self.lock():  # only the last part makes targets change their weights
                await put_in_all(queues, tasks, None)
                results = await asyncio.gather(*tasks, return_exceptions=True)
                return await self._finish_update(targets, results, first.update)
        finally:
            for task in tasks:
                task.cancel()

    @contextlib.contextmanager
    def _one_upload(self) -> Iterator[None]:
        """Exclude other tensors on any worker. Raises Conflict."""
        with self._facts.peers.try_lock("tensors") as free:
            if not free:
                raise Conflict("tensors of another update are being received; send these once it has ended")
            yield

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Exclude other weight updates, in this worker and in others."""
        async with self._updating, self._facts.peers.lock("weights"):
            yield

    async def _finish_update(
        self, targets: Sequence[TargetLink], results: Sequence[Any], update: common_pb2.WeightUpdate
    ) -> UpdateResult:
        """Record each target's weights, here and in other workers. Raises the first error."""
        found = [None if isinstance(result, BaseException) else result.weights for result in results]
        due = _served_weights(targets, found)
        here = [facts is not None and due is not None and facts.fingerprint == due.fingerprint for facts in found]
        if due is not None:
            update_facts = {
                "version": due.weight_version, "fingerprint": due.fingerprint, "folder": due.folder,
                "shared": due.shared_fingerprint,
                "here": [target.address for target, whole in zip(targets, here, strict=True) if whole],
            }  # fmt: skip
            self.adopt(update_facts)
            await self._facts.peers.ask("weights", update_facts)
        for target, facts, whole in zip(targets, found, here, strict=True):
            if facts is not None and not whole:
                log.warning(
                    "the target at %s lacks weights of earlier updates; it is unused until it has them all",
                    target.address,
                )
        if any(found) and not update.keep_cache:
            await self.flush_target_states()
        try:
            raise_first(results)
        except OutriderError as error:
            if any(found):
                error.message += f"; {sum(here)} of {len(results)} targets have the new weights, the others are unused"
            raise
        weights = due or next(facts for facts in found if facts is not None)
        unused = [target.address for target, whole in zip(targets, here, strict=True) if not whole]
        return UpdateResult(weights, len(here), unused)

    async def _settled(self, result: UpdateResult) -> UpdateResult:
        """Wait until all targets with the new weights are used, in all workers, so that the pool is ready then.

        A target that was refused for its old weights must repeat the handshake. Returns the result, with the targets
        that are not used after all.
        """
        unused = set(result.unused)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_TIMEOUT):
                while True:
                    others = (await self._facts.peers.ask("targets_up")).values()
                    up = set(self.targets_up()).intersection(*others)
                    unused = {target.address for target in self._services.targets} - up
                    if unused <= set(result.unused):
                        break
                    await asyncio.sleep(_POLL)
        return result._replace(unused=sorted(unused | set(result.unused)))

    def targets_up(self) -> list[str]:
        """Addresses of the targets that are used."""
        return [target.address for target in self._services.targets if target.up]

    @property
    def awaiting(self) -> list[str]:
        """Addresses of the targets that lack the served weights, and are unused until they are sent again."""
        return [target.address for target in self._services.targets if target.awaited_version is not None]

    async def flush_target_states(self) -> None:
        """Make drafts drop cached prefixes computed from the old weights' states."""
        for result in await self._services.flush_drafts(draft_pb2.FlushDraftRequest(only_fed=True)):
            if isinstance(result, OutriderError):  # costs accept length, not correctness
                log.warning("a draft keeps prefixes of the old weights: %s", result.message)

    def adopt(self, update: Mapping[str, Any]) -> None:
        """Record new weights, and let drafts follow.

        update: `version`, `fingerprint`, `folder` that they came from, `shared`: fingerprint of those that drafts
        share, and `here`: addresses of the targets that have them
        """
        model = self._facts.target.model
        model.fingerprint, self._facts.target.weight_version = update["fingerprint"], update["version"]
        for target in self._services.targets:
            here = target.address in update["here"]
            target.weights_changed(update["fingerprint"], update["version"], update["folder"], here=here)
        self._follower.aim(Goal(update["folder"], update["shared"], update["version"]))


async def _join(request: target_pb2.JoinWeightsGroupRequest, stub: Any) -> Any:
    return await stub.JoinWeightsGroup(request, timeout=_UPDATE_TIMEOUT)


def _served_weights(
    targets: Sequence[TargetLink], found: Sequence[common_pb2.WeightFacts | None]
) -> common_pb2.WeightFacts | None:
    """The weights that all targets must have from now on: those of a target that missed no update. None if unknown.

    found: weights of each target. A target that missed an update and gets a part of the next one has mixed weights.
    If all targets have, the first one without any of its original tensors decides.
    """
    pairs = [(target, facts) for target, facts in zip(targets, found, strict=True) if facts is not None]
    complete = [facts for target, facts in pairs if target.expects(facts.fingerprint_before)]
    return next(iter(complete or [facts for _, facts in pairs if facts.whole]), None)
