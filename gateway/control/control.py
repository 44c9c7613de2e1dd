"""Control of the services from the gateway: new weights, a flush, a pause. Every call goes to all of a kind at once.

What a target refuses as a bad update is the caller's mistake. A target that was away has missed the update; once it is
back, it is refused for its old weights until it gets all of the new ones too. Updates are taken over one after the
other: of two at once, one target could have the first in the end, and another one the second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import grpc

from gateway.control.server_info import Facts
from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import SHARE_TIMEOUT, DraftLink
from gateway.streams.target import TargetLink
from outrider.errors import ConfigError, InvalidRequest, OutriderError, Unavailable, from_grpc_code
from outrider.wire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]

_MODES: dict[PauseMode, common_pb2.PauseMode] = {
    "abort": common_pb2.PAUSE_MODE_ABORT,
    "retract": common_pb2.PAUSE_MODE_RETRACT,
    "in_place": common_pb2.PAUSE_MODE_IN_PLACE,
}
_CALL_TIMEOUT = 60.0  # seconds; a step may be under way
_LAST_CLOSES = 0.2  # seconds: the end of a cancelled request goes to its target over another connection than a flush
_FIRST_POLL, _LONGEST_POLL = 0.02, 0.5  # seconds between two attempts to flush
_UPDATE_TIMEOUT = 3600.0  # seconds to read or send all weights
_PARTS = 4  # of a stream that a slow target may lag behind the others
_PART_BYTES = 1 << 20


class Updated(NamedTuple):
    """What came of an update. resting: of so many targets those that are not used, for they lack earlier weights."""

    weights: common_pb2.WeightFacts
    targets: int
    resting: int


class Control:
    """All targets as one."""

    def __init__(self, orchestrator: Orchestrator, facts: Facts) -> None:
        """facts: what the gateway tells of its model; follows the weights."""
        self._orchestrator = orchestrator
        self._facts = facts
        self._updating = asyncio.Lock()

    @property
    def weight_version(self) -> str:
        """Label of the weights."""
        return self._facts.target.weight_version

    # --- weights ---

    async def update_from_disk(self, folder: str, update: common_pb2.WeightUpdate) -> Updated:
        """Take the weights of a folder that every target can read. Raises InvalidRequest for one that does not fit."""
        request = target_pb2.UpdateWeightsFromDiskRequest(folder=folder, update=update)
        async with self._alone():
            calls = [
                self._call(target, lambda stub: stub.UpdateWeightsFromDisk(request, timeout=_UPDATE_TIMEOUT))
                for target in self._targets
            ]
            return await self._changed(await asyncio.gather(*calls, return_exceptions=True), update, folder)

    async def update_from_tensors(self, parts: AsyncIterator[bytes], update: common_pb2.WeightUpdate) -> Updated:
        """Take tensors that come as one safetensors file. Raises InvalidRequest for those that do not fit."""
        queues: list[asyncio.Queue[bytes | None]] = [asyncio.Queue(_PARTS) for _ in self._targets]

        async def requests(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[Any]:
            yield target_pb2.UpdateWeightsFromTensorRequest(update=update)
            while (part := await queue.get()) is not None:
                yield target_pb2.UpdateWeightsFromTensorRequest(content=part)

        def send(queue: asyncio.Queue[bytes | None]) -> Callable[[Any], Awaitable[Any]]:
            return lambda stub: stub.UpdateWeightsFromTensor(requests(queue), timeout=_UPDATE_TIMEOUT)

        tasks = [
            asyncio.create_task(self._call(target, send(queue)))
            for target, queue in zip(self._targets, queues, strict=True)
        ]
        try:
            async for part in _cut(parts):
                await _put(queues, tasks, part)
            async with self._alone():  # what has come so far changes nothing, however slowly it comes
                await _put(queues, tasks, None)
                return await self._changed(await asyncio.gather(*tasks, return_exceptions=True), update)
        finally:
            for task in tasks:
                task.cancel()

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """While nobody else updates weights, here or in another worker."""
        async with self._updating, self._facts.peers.alone("weights"):
            yield

    async def _changed(self, results: Sequence[Any], update: common_pb2.WeightUpdate, folder: str = "") -> Updated:
        """Note what each target has now, here and in other workers. folder: of the weights. Raises the first error."""
        found = [None if isinstance(result, BaseException) else result.weights for result in results]
        due = self._due(found)
        here = [facts is not None and due is not None and facts.fingerprint == due.fingerprint for facts in found]
        if due is not None:
            news = {"version": due.weight_version, "fingerprint": due.fingerprint, "here": here}
            self.adopt(news)
            await self._facts.peers.ask("weights", news)
        for target, facts, whole in zip(self._targets, found, here, strict=True):
            if facts is not None and not whole:
                log.warning(
                    "the target at %s lacks weights of earlier updates; it rests until all come", target.address
                )
        if any(found) and not update.keep_cache:
            await self._forget_states(folder if due is not None else "")
        try:
            _check(results)
        except OutriderError as error:
            if any(found):
                error.message += f"; {sum(here)} of {len(results)} targets have the new weights, the others rest"
            raise
        return Updated(due or next(facts for facts in found if facts is not None), len(here), here.count(False))

    def _due(self, found: Sequence[common_pb2.WeightFacts | None]) -> common_pb2.WeightFacts | None:
        """What all targets must have from now on: what one has that lacked nothing before. found: of each, what it has.

        A target that has missed an update, and gets a part of the next one, has weights of no model. Where all have,
        the first one that has nothing left of what it was started with is right; None as long as none is.
        """
        pairs = [(target, facts) for target, facts in zip(self._targets, found, strict=True) if facts is not None]
        right = [facts for target, facts in pairs if target.expects(facts.fingerprint_before)]
        return next(iter(right or [facts for _, facts in pairs if facts.whole]), None)

    async def _forget_states(self, folder: str) -> None:
        """Let drafts forget what the old weights told them of prompts that may come again, and share the new ones."""
        for draft in self._orchestrator.drafts:
            draft.target_folder = folder or draft.target_folder
        for result in await self._flush_drafts(draft_pb2.FlushDraftRequest(only_fed=True, target_folder=folder)):
            if isinstance(result, OutriderError):  # which costs speed alone
                log.warning("a draft keeps prefixes of the old weights: %s", result.message)

    def adopt(self, news: Mapping[str, Any]) -> None:
        """Targets have new weights. news: their `version` and `fingerprint`; for each target, whether it is `here`."""
        model = self._facts.target.model
        model.fingerprint, self._facts.target.weight_version = news["fingerprint"], news["version"]
        for target, here in zip(self._targets, news["here"], strict=True):
            target.weights_changed(news["fingerprint"], news["version"], here=here)

    # --- cache and pauses ---

    async def flush_cache(self, timeout_s: float = 0.0) -> None:
        """Drop cached prefixes, and what drafts have learned.

        timeout_s: how long to wait for requests to end. Raises InvalidRequest when some are under way even then.
        """
        await self._flush_targets(time.monotonic() + max(timeout_s, _LAST_CLOSES))
        _check(await self._flush_drafts(draft_pb2.FlushDraftRequest()))

    async def _flush_drafts(self, request: draft_pb2.FlushDraftRequest) -> list[Any]:
        """What came of a request to each draft that is up; the others get it when they come back."""

        def flush(stub: Any) -> Any:
            return stub.FlushDraft(request, timeout=SHARE_TIMEOUT if request.target_folder else _CALL_TIMEOUT)

        calls: list[Coroutine[Any, Any, Any]] = []
        for draft in self._orchestrator.drafts:
            if draft.up:
                calls.append(_call(draft, draft_pb2_grpc.DraftServiceStub, flush))
            else:
                draft.flush_later(request)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _flush_targets(self, deadline: float) -> None:
        """Flush until none of them refuses, ever more seldom: each attempt interrupts their engines."""
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
        await self._note_pause(True)
        request = target_pb2.PauseGenerationRequest(mode=common_pb2.PauseMode.Name(_MODES[mode]))
        await self._all(lambda stub: stub.PauseGeneration(request, timeout=_CALL_TIMEOUT))

    async def proceed(self) -> None:
        """Generate again. A target that is away is told before it is used again."""
        await self._note_pause(False)
        request = target_pb2.ContinueGenerationRequest()
        await self._all(lambda stub: stub.ContinueGeneration(request, timeout=_CALL_TIMEOUT))

    async def _note_pause(self, paused: bool) -> None:
        self.adopt_pause(paused)
        await self._facts.peers.ask("pause", paused)

    def adopt_pause(self, paused: bool) -> None:
        """Whether targets are to pause, or to go on."""
        for target in self._targets:
            target.paused = paused

    # --- calls ---

    @property
    def _targets(self) -> list[TargetLink]:
        return self._orchestrator.targets

    async def _all(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        _check(await asyncio.gather(*(self._call(t, call) for t in self._targets), return_exceptions=True))

    async def _call(self, target: TargetLink, call: Callable[[Any], Awaitable[Any]]) -> Any:
        return await _call(target, target_pb2_grpc.TargetServiceStub, call)


async def _call(link: TargetLink | DraftLink, stub: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
    """Over a channel of its own: a target that is refused for its old weights can be called, too."""
    try:
        async with link.open_channel() as channel:
            return await call(stub(channel))
    except grpc.aio.AioRpcError as error:
        raise _error_of(link, error) from None


def _check(results: Sequence[Any]) -> None:
    """Raise the first error among results."""
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _error_of(link: TargetLink | DraftLink, error: grpc.aio.AioRpcError) -> OutriderError:
    found = from_grpc_code(int(error.code().value[0]), error.details() or "")
    if isinstance(found, ConfigError):
        return InvalidRequest(found.message)
    if isinstance(found, Unavailable):
        return Unavailable(f"the {link.service} at {link.address} cannot be reached: {found.message}")
    return found


async def _cut(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Parts no longer than a frame may be."""
    async for part in parts:
        for start in range(0, len(part), _PART_BYTES):
            yield part[start : start + _PART_BYTES]


async def _put(
    queues: Sequence[asyncio.Queue[bytes | None]], tasks: Sequence[asyncio.Task[Any]], part: bytes | None
) -> None:
    """Give a part to every call that still goes on."""
    for queue, task in zip(queues, tasks, strict=True):
        put = asyncio.create_task(queue.put(part))
        await asyncio.wait({put, task}, return_when=asyncio.FIRST_COMPLETED)
        put.cancel()
