"""Answers on their way to clients that may go away at any moment. Plain ASGI, for every chunk passes here."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.answers.errors import body_of
from gateway.orchestration.generator import Generator
from outrider.errors import EngineFault, OutriderError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"  # which clients skip
_SILENCE = 15.0  # seconds; proxies cut streams that say nothing for 30 or 60
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, Result], beside: Callable[[], Awaitable[float]] | None = None
) -> Result:
    """The work's result. Raises ClientGone if the client goes away first, which cancels the work.

    beside: awaited meanwhile; says after how many seconds it is to be awaited again
    """

    async def gone() -> None:
        message: Message = {}
        while message.get("type") != "http.disconnect":
            message = await receive()

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        done: set[asyncio.Task[Any]] = set()
        while not done:
            seconds = await beside() if beside is not None else None
            done, _ = await asyncio.wait({task, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class Reply(Protocol):
    """An answer that can be told whole or in events. Whoever starts it must close it."""

    async def start(self, generator: Generator) -> None:
        """Open its sessions. Raises InvalidRequest, Unavailable."""

    async def whole(self) -> bytes:
        """All of it, as JSON."""

    def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. Raises the error that ends them."""

    def close(self) -> None:
        """Free its sessions."""


def failed(error: OutriderError) -> bytes:
    """What ends a stream that fails on its way: the status has been sent."""
    return b"data: " + body_of(error) + b"\n\n" + DONE


async def respond(
    request: Request,
    reply: Reply,
    generator: Generator,
    *,
    stream: bool,
    failed: Callable[[OutriderError], bytes] = failed,
) -> Response:
    """Start a reply, and answer with it. Raises what is wrong before anything has been said; then `failed` says it."""
    try:
        await reply.start(generator)
        if stream:
            return EventStream(reply, failed)
        whole = await unless_gone(request.receive, reply.whole())
    except ClientGone:
        reply.close()
        return _nobody_reads_it()
    except BaseException:
        reply.close()
        raise
    reply.close()
    return Response(whole, media_type="application/json")


def _nobody_reads_it() -> Response:
    return Response(status_code=499)


class EventStream(Response):
    """Server-sent events of a reply, one message an event. Closes the reply, however it ends.

    It begins with the first event, or when that has been waited for long; from then on no silence lasts longer.
    """

    media_type = "text/event-stream"

    def __init__(
        self, reply: Reply, failed: Callable[[OutriderError], bytes] = failed, *, silence: float = _SILENCE
    ) -> None:
        """reply: has been started. failed: what is said instead of further events, if an error ends them.

        silence: seconds after which a comment is sent where nothing else is
        """
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._reply = reply
        self._failed = failed
        self._silence = silence
        self._started = False
        self._due = 0.0  # when a comment is, by the event loop's clock; never while something else is being sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until there are no more, or the client is gone. Raises what is wrong before it begins."""
        self._due = asyncio.get_running_loop().time() + self._silence
        try:
            await unless_gone(receive, self._send(send), partial(self._keep_alive, send))
        except ClientGone:
            if not self._started:
                await _nobody_reads_it()(scope, receive, send)
        finally:
            self._reply.close()

    async def _send(self, send: Send) -> None:
        clock, silence = asyncio.get_running_loop().time, self._silence
        try:
            async for event in self._reply.events():
                self._due = math.inf
                if not self._started:
                    await self._start(send)
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._due = clock() + silence
        except Exception as error:
            self._due = math.inf
            if not self._started:
                raise  # it still has a status of its own
            if not isinstance(error, OutriderError):
                log.error("a stream failed", exc_info=error)
                error = EngineFault("the gateway failed; see its log")
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        self._due = math.inf
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _keep_alive(self, send: Send) -> float:
        """Send a comment if it is due. Returns seconds until one may be."""
        clock = asyncio.get_running_loop().time
        if clock() >= self._due:
            self._due = clock() + self._silence
            if not self._started:
                await self._start(send)
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
        return min(self._due - clock(), self._silence)
