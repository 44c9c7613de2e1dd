"""Calls of a service at several replicas at once: their errors, and a body that is sent to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc

from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.errors import ConfigError, InvalidRequest, OutriderError, Unavailable, from_grpc_code
from outrider.transport.uploads import BROKEN
from outrider.wire.v1 import draft_pb2, draft_pb2_grpc, target_pb2_grpc

CALL_TIMEOUT = 60.0  # seconds; a step may be running
_SILENCE = 60.0  # seconds in which a client that sends a body must send more
_PART_BYTES = 1 << 20


async def call_replica(link: TargetLink | DraftLink, stub: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
    """Call a service over a new channel, so that a target refused for its old weights can be called as well."""
    try:
        async with link.open_channel() as channel:
            return await call(stub(channel))
    except grpc.aio.AioRpcError as error:
        raise _error_of(link, error) from None


def raise_first(results: Sequence[Any]) -> None:
    """Raise the first error among results."""
    for result in results:
        if isinstance(result, BaseException):
            raise result


class Services:
    """The replicas of a model, called together."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator

    @property
    def targets(self) -> list[TargetLink]:
        """A copy, because targets come and go while they are called."""
        return list(self.orchestrator.targets)

    def some_targets(self) -> list[TargetLink]:
        """All targets. Raises Unavailable if there is none, because no target would have the new weights."""
        if not (targets := self.targets):
            raise Unavailable("the pool of targets is empty; add one with POST /workers first")
        return targets

    async def call_targets(self, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """The results of all targets. Raises the first error, once all have answered."""
        results = await asyncio.gather(*(self.call_target(t, call) for t in self.targets), return_exceptions=True)
        raise_first(results)
        return results

    async def call_target(self, target: TargetLink, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """The result of one. Raises InvalidRequest, Unavailable."""
        return await call_replica(target, target_pb2_grpc.TargetServiceStub, call)

    async def flush_drafts(self, request: draft_pb2.FlushDraftRequest) -> list[Any]:
        """Results of the call on each draft that is up; the others get it when they reconnect."""

        def flush(stub: Any) -> Any:
            return stub.FlushDraft(request, timeout=CALL_TIMEOUT)

        calls: list[Coroutine[Any, Any, Any]] = []
        for draft in list(self.orchestrator.drafts):
            if draft.up:
                calls.append(call_replica(draft, draft_pb2_grpc.DraftServiceStub, flush))
            else:
                draft.flush_later(request)
        return await asyncio.gather(*calls, return_exceptions=True)


def _error_of(link: TargetLink | DraftLink, error: grpc.aio.AioRpcError) -> OutriderError:
    code = grpc.StatusCode.UNAVAILABLE if error.details() == BROKEN else error.code()
    found = from_grpc_code(int(code.value[0]), error.details() or "")
    if isinstance(found, ConfigError):
        return InvalidRequest(found.message)
    if isinstance(found, Unavailable):
        return Unavailable(f"the {link.service} at {link.address} cannot be reached: {found.message}")
    return found


async def cut(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The parts, cut to the size limit of a frame. Raises InvalidRequest if the client stops sending."""
    while True:
        try:
            async with asyncio.timeout(_SILENCE):
                part = await anext(parts, None)
        except TimeoutError:
            raise InvalidRequest(f"no more tensors arrived for {_SILENCE:.0f} s; send them again") from None
        if part is None:
            return
        for start in range(0, len(part), _PART_BYTES):
            yield part[start : start + _PART_BYTES]


async def put_in_all(
    queues: Sequence[asyncio.Queue[bytes | None]], tasks: Sequence[asyncio.Task[Any]], part: bytes | None
) -> None:
    """Put a part of a body into the queue of every running call."""
    for queue, task in zip(queues, tasks, strict=True):
        put = asyncio.create_task(queue.put(part))
        await asyncio.wait({put, task}, return_when=asyncio.FIRST_COMPLETED)
        put.cancel()
