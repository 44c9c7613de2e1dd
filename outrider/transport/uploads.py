"""Calls that take a stream of requests and answer once: weights and fusion layers in parts.

gRPC loses the status of a call that ends while its client writes: the client then reports an internal error of its own,
or that it cancelled the call. So a service that has its answer before the last request, a refusal for instance, sends
its initial metadata, reads on without looking, and answers once the client has ended the stream. A client ends it when
the metadata arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc

from outrider.errors import OutriderError
from outrider.transport.statuses import statuses

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])

BROKEN = "Internal error from Core"
"""Details of a call whose connection broke during a write, or which the service ended then."""

_END = object()


def answers_upload(method: Method) -> Method:
    """A method of a servicer that takes a stream: it answers, also with the status of an OutriderError, once the
    client has ended the stream.
    """

    @functools.wraps(method)
    async def answer(
        servicer: Any, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        async with statuses(context):
            try:
                found = await method(servicer, request_iterator, context)
            except OutriderError:
                await _end(request_iterator, context)
                raise
            await _end(request_iterator, context)
            return found

    return cast("Method", answer)


async def _end(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Let the client end its stream."""
    await context.send_initial_metadata(())
    with contextlib.suppress(OutriderError):  # a request that is too large
        async for _ in requests:
            pass


async def upload(method: Callable[..., Any], requests: AsyncIterator[Any], timeout: float) -> Any:  # noqa: ASYNC109
    """The answer to a stream of requests, of which no more are taken once the service has its answer.

    method: of a stub. timeout: of the whole call, in seconds. Raises AioRpcError.
    """
    call = method(timeout=timeout)
    answered = asyncio.ensure_future(call.initial_metadata())
    try:
        async with contextlib.aclosing(_until(answered, requests)) as wanted:
            async for request in wanted:
                if not await _written(call.write(request)):
                    break
            else:
                await _written(call.done_writing())
        return await call
    finally:
        answered.cancel()
        call.cancel()


async def _until(answered: asyncio.Future[Any], requests: AsyncIterator[Any]) -> AsyncGenerator[Any]:
    """The requests that come before the answer."""
    iterator = aiter(requests)
    while not answered.done():
        step = asyncio.ensure_future(anext(iterator, _END))
        try:
            await asyncio.wait({step, answered}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not step.done():
                step.cancel()
        if not step.done() or (request := step.result()) is _END:
            return
        yield request


async def _written(write: Awaitable[None]) -> bool:
    """False if the call ended meanwhile, for a reason that its status has."""
    try:
        await write
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        return False
    return True
