"""Answers on their way to clients that may go away at any moment. Plain ASGI, for every chunk passes here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.errors import body_of
from gateway.generator import Generator
from outrider.errors import EngineFault, OutriderError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. Raises ClientGone if the client goes away first, which cancels the work."""

    async def gone() -> None:
        message: Message = {}
        while message.get("type") != "http.disconnect":
            message = await receive()

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class Reply(Protocol):
    """An answer that can be told whole or in events. Whoever starts it must close it."""

    def start(self, generator: Generator) -> None:
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
        reply.start(generator)
        if stream:
            events = reply.events()
            # What is wrong before the first event still has a status of its own.
            first = await unless_gone(request.receive, _first(events))
            return EventStream(reply, first, events, failed)
        whole = await unless_gone(request.receive, reply.whole())
    except ClientGone:
        reply.close()
        return Response(status_code=499)  # nobody reads it
    except BaseException:
        reply.close()
        raise
    reply.close()
    return Response(whole, media_type="application/json")


async def _first(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


class EventStream(Response):
    """Server-sent events of a reply, one message an event. Closes the reply, however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        reply: Reply,
        first: bytes,
        rest: AsyncIterator[bytes],
        failed: Callable[[OutriderError], bytes] = failed,
    ) -> None:
        """first: the first event, which has come; the status depended on it. rest: the others.

        failed: what is said instead of further ones, if an error ends them
        """
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._reply = reply
        self._first = first
        self._rest = rest
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until there are no more, or the client is gone."""
        del scope
        try:
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self._send(send))
        finally:
            self._reply.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for event in self._rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except OutriderError as error:
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            body = self._failed(EngineFault("the gateway failed; see its log"))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
