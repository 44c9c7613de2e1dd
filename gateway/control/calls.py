"""Calls of a service at several replicas at once: their errors, and a body that is sent to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.errors import ConfigError, InvalidRequest, OutriderError, Unavailable, from_grpc_code
from outrider.wire.v1 import common_pb2

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


def _error_of(link: TargetLink | DraftLink, error: grpc.aio.AioRpcError) -> OutriderError:
    found = from_grpc_code(int(error.code().value[0]), error.details() or "")
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


def served_weights(
    targets: Sequence[TargetLink], found: Sequence[common_pb2.WeightFacts | None]
) -> common_pb2.WeightFacts | None:
    """The weights that all targets must have from now on: those of a target that missed no update. None if unknown.

    found: weights of each target. A target that missed an update and gets a part of the next one has mixed weights.
    If all targets have, the first one without any of its original tensors decides.
    """
    pairs = [(target, facts) for target, facts in zip(targets, found, strict=True) if facts is not None]
    complete = [facts for target, facts in pairs if target.expects(facts.fingerprint_before)]
    return next(iter(complete or [facts for _, facts in pairs if facts.whole]), None)
