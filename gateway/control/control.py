"""Control of the services: weight updates, cache flushes, pauses. Every call goes to all targets or drafts.

An update that a target refuses as invalid is the caller's mistake. A target that was away misses the update, and is
unused because of its old weights until it has all new ones. Updates are serialized; otherwise two concurrent ones could
leave different weights on different targets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from gateway.control.calls import call_replica, cut, put_in_all, raise_first
from gateway.control.draft_weights import DraftFollower, Goal
from gateway.control.server_info import Facts
from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.errors import Conflict, InvalidRequest, OutriderError, Unavailable
from outrider.wire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]

_MODES: dict[PauseMode, common_pb2.PauseMode] = {
    "abort": common_pb2.PAUSE_MODE_ABORT,
    "retract": common_pb2.PAUSE_MODE_RETRACT,
    "in_place": common_pb2.PAUSE_MODE_IN_PLACE,
}
_CALL_TIMEOUT = 60.0  # seconds; a step may be running
_LAST_CLOSES = 0.2  # seconds; closes of cancelled requests reach a target over another connection than the flush
_FIRST_POLL, _LONGEST_POLL = 0.02, 0.5  # seconds between two attempts to flush
_UPDATE_TIMEOUT = 3600.0  # seconds to read or send all weights
_READY_TIMEOUT = 30.0  # seconds for targets with new weights to be used
_MAX_PARTS = 4  # of a stream by which a slow target may lag behind the others
_NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file


class UpdateResult(NamedTuple):
    """The result of an update. targets: their number. unused: addresses of those that lack weights, or are away."""

    weights: common_pb2.WeightFacts
    targets: int
    unused: list[str]


class Control:
    """Controls all targets and drafts together."""

    def __init__(self, orchestrator: Orchestrator, facts: Facts) -> None:
        """facts: about the served model; updated with the weights."""
        self._orchestrator = orchestrator
        self._facts = facts
        self._updating = asyncio.Lock()
        self._paused = False  # as a client asked for it last
        self._flushed = False  # as a client asked for it
        known = facts.target
        self._follower = DraftFollower(
            orchestrator, Goal(known.weights_folder, known.shared_fingerprint, known.weight_version)
        )
        links: list[TargetLink | DraftLink] = [*orchestrator.targets, *orchestrator.drafts]
        for link in links:
            self.prepare(link)

    def prepare(self, link: TargetLink | DraftLink) -> None:
        """Make a replica, before it is used, take part in pauses, flushes and weight updates so far."""
        if isinstance(link, DraftLink):
            self._follower.prepare(link)
            if self._flushed:  # it may have been in the pool before
                link.flush_later(draft_pb2.FlushDraftRequest())
            return
        link.flush_due = self._flushed
        link.update_lock = self._update_lock
        others = [target for target in self._targets if target is not link]
        # Another gateway may have let the targets continue, which their reports show.
        if self._paused and (not others or any(target.paused for target in others)):
            link.set_paused(True)

    @property
    def weight_version(self) -> str:
        """Version label of the weights."""
        return self._facts.target.weight_version

    async def label(self, version: str, *, abort_all_requests: bool) -> UpdateResult:
        """Change the label of the weights, which stay."""
        update = common_pb2.WeightUpdate(weight_version=version, keep_cache=True, abort_all_requests=abort_all_requests)

        async def none() -> AsyncIterator[bytes]:
            yield _NO_TENSORS

        return await self.update_from_tensors(none(), update)

    # --- weights ---

    async def update_from_disk(self, folder: str, update: common_pb2.WeightUpdate) -> UpdateResult:
        """Load weights from a folder that every target can read. Raises InvalidRequest if they do not fit."""
        request = target_pb2.UpdateWeightsFromDiskRequest(folder=folder, update=update)
        async with self._update_lock():
            targets = self._some_targets()
            calls = [
                self._call(target, lambda stub: stub.UpdateWeightsFromDisk(request, timeout=_UPDATE_TIMEOUT))
                for target in targets
            ]
            result = await self._finish_update(targets, await asyncio.gather(*calls, return_exceptions=True), update)
        return await self._settled(result)

    @property
    def max_update_bytes(self) -> int:
        """Largest pickle of tensors that any target reads, in bytes."""
        return max((target.info.max_update_bytes for target in self._targets if target.info is not None), default=0)

    async def update_from_tensors(
        self, parts: AsyncIterator[bytes], update: common_pb2.WeightUpdate, *, pickled: bool = False
    ) -> UpdateResult:
        """Load tensors sent as one safetensors file, or as a pickle. Raises InvalidRequest if they do not fit, and
        Conflict while others are being sent, because the targets keep all of them in memory.
        """
        update.shared_tensors.extend(self._follower.shared_tensors)
        with self._facts.peers.try_lock("tensors") as free:
            if not free:
                raise Conflict("tensors of another update are being received; send these once it has ended")
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
        for target in self._some_targets():
            own = target_pb2.JoinWeightsGroupRequest.FromString(request.SerializeToString())
            own.rank = rank
            rank += max(target.info.ranks, 1) if target.info is not None else 1
            calls.append(self._call(target, partial(_join, own)))
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
        await self._all(lambda stub: stub.LeaveWeightsGroup(request, timeout=_CALL_TIMEOUT))

    async def update_from_group(self, request: target_pb2.UpdateWeightsFromGroupRequest) -> UpdateResult:
        """Load tensors that a trainer broadcasts. Raises InvalidRequest if they do not fit or arrive, and Conflict
        while others are being sent.
        """
        request.update.shared_tensors.extend(self._follower.shared_tensors)
        with self._facts.peers.try_lock("tensors") as free:
            if not free:
                raise Conflict("tensors of another update are being received; send these once it has ended")
            async with self._update_lock():
                targets = self._some_targets()
                calls = [
                    self._call(target, lambda stub: stub.UpdateWeightsFromGroup(request, timeout=_UPDATE_TIMEOUT))
                    for target in targets
                ]
                results = await asyncio.gather(*calls, return_exceptions=True)
                result = await self._finish_update(targets, results, request.update)
        return await self._settled(result)

    async def _send_tensors(
        self, parts: AsyncIterator[bytes], first: target_pb2.UpdateWeightsFromTensorRequest
    ) -> UpdateResult:
        targets = self._some_targets()  # one that joins later lacks the first parts, so that it is unused
        queues: list[asyncio.Queue[bytes | None]] = [asyncio.Queue(_MAX_PARTS) for _ in targets]

        async def requests(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[Any]:
            yield first
            while (part := await queue.get()) is not None:
                yield target_pb2.UpdateWeightsFromTensorRequest(content=part)

        def send(queue: asyncio.Queue[bytes | None]) -> Callable[[Any], Awaitable[Any]]:
            return lambda stub: stub.UpdateWeightsFromTensor(requests(queue), timeout=_UPDATE_TIMEOUT)

        tasks = [
            asyncio.create_task(self._call(target, send(queue))) for target, queue in zip(targets, queues, strict=True)
        ]
        try:
            async for part in cut(parts):
                await put_in_all(queues, tasks, part)
                if all(task.done() for task in tasks):
                    break  # every target has refused them, so the rest of the body need not arrive
            async with self._update_lock():  # only the last part makes targets change their weights
                await put_in_all(queues, tasks, None)
                results = await asyncio.gather(*tasks, return_exceptions=True)
                return await self._finish_update(targets, results, first.update)
        finally:
            for task in tasks:
                task.cancel()

    @contextlib.asynccontextmanager
    async def _update_lock(self) -> AsyncIterator[None]:
        """Exclude other weight updates, in this worker and in others."""
        async with self._updating, self._facts.peers.lock("weights"):
            yield

    async def _finish_update(
        self, targets: Sequence[TargetLink], results: Sequence[Any], update: common_pb2.WeightUpdate
    ) -> UpdateResult:
        """Record each target's weights, here and in other workers. Raises the first error."""
        found = [None if isinstance(result, BaseException) else result.weights for result in results]
        due = self._served_weights(targets, found)
        here = [facts is not None and due is not None and facts.fingerprint == due.fingerprint for facts in found]
        if due is not None:
            update_facts = {
                "version": due.weight_version, "fingerprint": due.fingerprint, "folder": due.folder,
                "shared": due.shared_fingerprint,
                "here": [target.address for target, whole in zip(targets, here, strict=True) if whole],
            }  # fmt: skip
            self.adopt_weights(update_facts)
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
                    unused = {target.address for target in self._targets} - up
                    if unused <= set(result.unused):
                        break
                    await asyncio.sleep(_FIRST_POLL)
        return result._replace(unused=sorted(unused | set(result.unused)))

    def targets_up(self) -> list[str]:
        """Addresses of the targets that are used."""
        return [target.address for target in self._targets if target.up]

    @property
    def awaiting(self) -> list[str]:
        """Addresses of the targets that lack the served weights, and are unused until they are sent again."""
        return [target.address for target in self._targets if target.awaited_version is not None]

    @staticmethod
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

    async def flush_target_states(self) -> None:
        """Make drafts drop cached prefixes computed from the old weights' states."""
        for result in await self.flush_drafts(draft_pb2.FlushDraftRequest(only_fed=True)):
            if isinstance(result, OutriderError):  # costs accept length, not correctness
                log.warning("a draft keeps prefixes of the old weights: %s", result.message)

    def adopt_weights(self, update: Mapping[str, Any]) -> None:
        """Record new weights, and let drafts follow.

        update: `version`, `fingerprint`, `folder` that they came from, `shared`: fingerprint of those that drafts
        share, and `here`: addresses of the targets that have them
        """
        model = self._facts.target.model
        model.fingerprint, self._facts.target.weight_version = update["fingerprint"], update["version"]
        for target in self._targets:
            here = target.address in update["here"]
            target.weights_changed(update["fingerprint"], update["version"], update["folder"], here=here)
        self._follower.aim(Goal(update["folder"], update["shared"], update["version"]))

    # --- cache and pauses ---

    async def flush_cache(self, timeout_s: float = 0.0) -> None:
        """Drop cached prefixes, and the n-grams of drafts.

        timeout_s: seconds to wait for requests to end. Raises InvalidRequest if some are still running then.
        """
        self._flushed = True
        await self._flush_targets(time.monotonic() + max(timeout_s, _LAST_CLOSES))
        raise_first(await self.flush_drafts(draft_pb2.FlushDraftRequest()))

    async def flush_drafts(self, request: draft_pb2.FlushDraftRequest) -> list[Any]:
        """Results of the call on each draft that is up; the others get it when they reconnect."""

        def flush(stub: Any) -> Any:
            return stub.FlushDraft(request, timeout=_CALL_TIMEOUT)

        calls: list[Coroutine[Any, Any, Any]] = []
        for draft in list(self._orchestrator.drafts):
            if draft.up:
                calls.append(call_replica(draft, draft_pb2_grpc.DraftServiceStub, flush))
            else:
                draft.flush_later(request)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _flush_targets(self, deadline: float) -> None:
        """Flush until no target refuses, at growing intervals, because each attempt interrupts the engines."""
        pause = _FIRST_POLL
        while True:
            try:
                await self._all(lambda stub: stub.FlushCache(target_pb2.FlushCacheRequest(), timeout=_CALL_TIMEOUT))
            except InvalidRequest:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
            else:
                return
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_POLL)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. A target that is away is paused before it is used again."""
        await self._set_paused(True)
        request = target_pb2.PauseGenerationRequest(mode=common_pb2.PauseMode.Name(_MODES[mode]))
        await self._all(lambda stub: stub.PauseGeneration(request, timeout=_CALL_TIMEOUT))

    async def resume(self) -> None:
        """Continue generating. A target that is away continues before it is used again."""
        await self._set_paused(False)
        request = target_pb2.ContinueGenerationRequest()
        await self._all(lambda stub: stub.ContinueGeneration(request, timeout=_CALL_TIMEOUT))

    async def release_memory(self) -> int:
        """Let the targets return the memory of their KV caches. Returns its size, in bytes. Raises InvalidRequest."""
        request = target_pb2.ReleaseMemoryRequest()
        found = await self._all(lambda stub: stub.ReleaseMemory(request, timeout=_CALL_TIMEOUT))
        return sum(one.released_bytes for one in found)

    async def resume_memory(self) -> None:
        """Let the targets take memory again."""
        request = target_pb2.ResumeMemoryRequest()
        await self._all(lambda stub: stub.ResumeMemory(request, timeout=_CALL_TIMEOUT))

    async def _set_paused(self, paused: bool) -> None:
        self.adopt_pause(paused)
        await self._facts.peers.ask("pause", paused)

    def adopt_pause(self, paused: bool) -> None:
        """Set whether targets are paused before they are used again."""
        self._paused = paused
        for target in self._targets:
            target.set_paused(paused)

    # --- calls ---

    @property
    def _targets(self) -> list[TargetLink]:
        """A copy, because targets come and go while they are called."""
        return list(self._orchestrator.targets)

    def _some_targets(self) -> list[TargetLink]:
        """All targets. Raises Unavailable if there is none, because no target would have the new weights."""
        if not (targets := self._targets):
            raise Unavailable("the pool of targets is empty; add one with POST /workers first")
        return targets

    async def _all(self, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """The results of all targets. Raises the first error, once all have answered."""
        results = await asyncio.gather(*(self._call(t, call) for t in self._targets), return_exceptions=True)
        raise_first(results)
        return results

    async def _call(self, target: TargetLink, call: Callable[[Any], Awaitable[Any]]) -> Any:
        return await call_replica(target, target_pb2_grpc.TargetServiceStub, call)


async def _join(request: target_pb2.JoinWeightsGroupRequest, stub: Any) -> Any:
    return await stub.JoinWeightsGroup(request, timeout=_UPDATE_TIMEOUT)
