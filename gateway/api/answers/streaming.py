"""Sends replies to clients, which may disconnect at any moment. Plain ASGI, because every chunk passes here."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.answers.errors import body_of
from gateway.orchestration.generation import Generation
from outrider.errors import DeadlineExceeded, EngineFault, OutriderError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CONNECTION = "outrider.connection"
"""Key of the ASGI scope: the request's connection, whose `cut` sends the event that its `last_event` makes."""

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"  # ignored by clients
_SILENCE = 15.0  # seconds; proxies close streams that are silent for 30 or 60
_LAST_SECONDS = 1.0  # beyond a stream's deadline, for the error that reports it
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_CLIENT_CLOSED_REQUEST = 499
_UNREAD = "the client did not read its answer in time; read events as they come"


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, Result], periodic: Callable[[], Awaitable[float]] | None = None
) -> Result:
    """The work's result. Raises ClientGone if the client disconnects first, which cancels the work.

    periodic: awaited meanwhile; returns the seconds until it is awaited again
    """

    async def gone() -> None:
        message: Message = {}
        while message.get("type") != "http.disconnect":
            message = await receive()

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        done: set[asyncio.Task[Any]] = set()
        while not done:
            seconds = await periodic() if periodic is not None else None
            done, _ = await asyncio.wait({task, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class Reply(Protocol):
    """Formats the answer of some generations, whole or as events."""

    async def whole(self, generations: Sequence[Generation]) -> bytes:
        """The whole answer, as JSON."""

    def events(self, generations: Sequence[Generation]) -> AsyncIterator[bytes]:
        """Server-sent events. Raises the error that ends them."""


def failed(error: OutriderError) -> bytes:
    """The events that end a stream after an error; its status has been sent already."""
    return b"data: " + body_of(error) + b"\n\n" + DONE


async def respond(
    request: Request,
    reply: Reply,
    generations: Sequence[Generation],
    *,
    stream: bool,
    failed: Callable[[OutriderError], bytes] = failed,
) -> Response:
    """The HTTP response, whole or streamed. Closes the generations. Raises errors that precede a whole answer.

    failed: formats an error that ends a stream
    """
    if stream:
        ends = [generation.deadline for generation in generations if generation.deadline is not None]
        return EventStream(reply, generations, failed, deadline=min(ends, default=None))
    try:
        whole = await until_disconnect(request.receive, reply.whole(generations))
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        _close(generations)
    return Response(whole, media_type="application/json")


def _close(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()


class EventStream(Response):
    """Server-sent events of a reply, one ASGI message per event. Closes the generations, however it ends.

    The response starts with the first event, or with a keep-alive comment if the first event takes long; comments then
    fill every silence.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        reply: Reply,
        generations: Sequence[Generation],
        failed: Callable[[OutriderError], bytes] = failed,
        *,
        silence: float = _SILENCE,
        deadline: float | None = None,
    ) -> None:
        """failed: formats an error that ends the events. silence: seconds after which a comment is sent.

        deadline: for the last event to be sent, by the event loop's clock
        """
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._reply = reply
        self._generations = generations
        self._failed = failed
        self._silence = silence
        self._deadline = None if deadline is None else deadline + _LAST_SECONDS
        self._started = False
        self._due = 0.0  # time of the next comment, by the event loop's clock; infinite while anything is being sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client disconnects. Raises errors that precede the first event."""
        self._due = asyncio.get_running_loop().time() + self._silence
        connection = scope.get(CONNECTION)
        if connection is not None:
            connection.last_event = partial(self._failed, DeadlineExceeded(_UNREAD))
        try:
            async with asyncio.timeout_at(self._deadline):
                await until_disconnect(receive, self._send(send), partial(self._keep_alive, send))
        except TimeoutError:
            log.warning("a stream is cut: its client had not read all of it when the deadline of the request passed")
            if connection is not None:
                connection.cut()
        except ClientGone:
            if not self._started:
                await Response(status_code=_CLIENT_CLOSED_REQUEST)(scope, receive, send)
        finally:
            _close(self._generations)

    async def _send(self, send: Send) -> None:
        clock, silence = asyncio.get_running_loop().time, self._silence
        try:
            async for event in self._reply.events(self._generations):
                self._due = math.inf
                if not self._started:
                    await self._start(send)
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._due = clock() + silence
        except Exception as error:
            self._due = math.inf
            if not self._started:
                raise  # the response can still have the error's status
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
        """Send a comment if it is due. Returns the seconds until the next one may be."""
        clock = asyncio.get_running_loop().time
        if clock() >= self._due:
            self._due = clock() + self._silence
            if not self._started:
                await self._start(send)
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
        return min(self._due - clock(), self._silence)
