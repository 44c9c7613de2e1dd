"""Streams of an engine: many gateways on one engine, one bidirectional stream each.

Frames are decoded and handed to the engine loop. What a step says is routed to the streams that own its sessions; while
a stream is busy writing, later steps gather in its next frame. A stream is the lease of its sessions: when it ends, for
whatever reason, they are closed.

Frames that come through gRPC are read and written in the network thread, those that go past it by the engine's
(socket_streams.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any, Generic

import grpc

from outrider.errors import InvalidRequest
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Message, StepOutput
from outrider.transport.frame_socket import FrameSocket
from outrider.transport.outbox import Outbox, Routes
from outrider.transport.socket_acceptor import SocketAcceptor
from outrider.transport.socket_streams import Decode, Encode, Request, Response, SocketStream, SocketStreams

log = logging.getLogger(__name__)


class StreamHub(Generic[Request, Response]):
    """Routes between an engine loop and its streams. All but `publish` runs in the network thread."""

    def __init__(self, engine: EngineLoop, decode: Decode[Request], encode: Encode[Response]) -> None:
        """decode, encode: between frames and domain types."""
        self._engine = engine
        self._decode = decode
        self._encode = encode
        self._loop = asyncio.get_running_loop()
        self._routes = Routes()
        self._ends: set[Callable[[], object]] = set()  # of all streams
        self._piped = SocketStreams(engine.inbox, decode, encode)
        self.pipes = SocketAcceptor()

    def publish(self, output: StepOutput) -> None:
        """Route a step's output; called in the engine thread, once a step."""
        self._piped.publish(output)
        if self._routes:
            self._loop.call_soon_threadsafe(self._routes.route, output)

    def close(self) -> None:
        """End all streams."""
        for end in list(self._ends):
            end()

    async def answer(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Any, Any], kind: Any
    ) -> AsyncIterator[Response]:
        """A stream call, from its beginning to its end. Yields nothing where frames go past it.

        kind: of the messages that come
        """
        pipe = await self.pipes.pipe_of(context)
        if pipe is not None:
            await self._serve_past(pipe, kind)
            return
        async for response in self.serve(requests):
            yield response

    async def _serve_past(self, pipe: FrameSocket, kind: Any) -> None:
        """One stream whose frames go past gRPC, until it ends."""
        ended: asyncio.Future[None] = self._loop.create_future()
        stream = SocketStream(pipe, kind, lambda error: self._loop.call_soon_threadsafe(_resolve, ended, error))
        self._ends.add(end := partial(_resolve, ended, None))
        try:
            await asyncio.wrap_future(self._engine.call(partial(self._piped.begin, stream)))
            await ended
        finally:
            self._ends.discard(end)
            # Also where the engine has gone and ends nothing any more.
            self._engine.call(partial(self._piped.end, stream)).add_done_callback(lambda _: pipe.close())

    async def serve(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Response, None]:
        """One stream through gRPC: reads its frames, yields the answers, closes its sessions at the end."""
        ready = asyncio.Event()
        outbox = Outbox(ready.set)
        self._routes.enter(outbox)
        reader = asyncio.create_task(self._read(requests, outbox))
        reader.add_done_callback(lambda _: ready.set())
        self._ends.add(end := reader.cancel)
        try:
            while True:
                await ready.wait()
                if reader.done():
                    break
                output = outbox.take()
                if not outbox.full:
                    ready.clear()
                yield self._encode(output)
            if not reader.cancelled() and (error := reader.exception()) is not None:
                raise error
        finally:
            self._ends.discard(end)
            reader.cancel()
            if orphans := self._routes.leave(outbox):
                self._engine.submit(Message(closes=orphans))

    async def _read(self, requests: AsyncIterator[Request], outbox: Outbox) -> None:
        try:
            async for frame in requests:
                message, failures = self._decode(frame)
                self._routes.note(message, outbox)
                self._engine.submit(message)
                if failures:
                    outbox.fail(failures)
        except InvalidRequest as error:
            log.warning("a stream sent a frame that cannot be read: %s", error.message)
            raise


def _resolve(ended: asyncio.Future[None], error: Exception | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
