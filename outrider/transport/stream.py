"""Streams of an engine: each gateway has one bidirectional stream to it.

Frames are decoded and submitted to the engine loop. A step's output is routed to the streams that own its sessions;
while a stream is writing, the output of later steps collects in its next frame. A stream is the lease of its sessions:
when it ends, for any reason, they are closed.

The network thread reads and writes frames that use gRPC, the engine thread those that use a socket (socket_streams.py).
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
    """Routes between an engine loop and its streams. All methods but `publish` run in the network thread."""

    def __init__(self, engine: EngineLoop, decode: Decode[Request], encode: Encode[Response]) -> None:
        """decode, encode: conversions between frames and domain types."""
        self._engine = engine
        self._decode = decode
        self._encode = encode
        self._loop = asyncio.get_running_loop()
        self._routes = Routes()
        self._ends: set[Callable[[], object]] = set()  # one for each stream: ends it
        self._socket_streams = SocketStreams(engine.inbox, decode, encode)
        self.acceptor = SocketAcceptor()

    def publish(self, output: StepOutput) -> None:
        """Route a step's output. Called in the engine thread, once a step."""
        self._socket_streams.publish(output)
        if self._routes:
            self._loop.call_soon_threadsafe(self._routes.route, output)

    def close(self) -> None:
        """End all streams."""
        for end in list(self._ends):
            end()

    async def answer(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Any, Any], kind: Any
    ) -> AsyncIterator[Response]:
        """Serve a stream call until it ends. Yields nothing if its frames use a socket.

        kind: class of the received messages
        """
        connection = await self.acceptor.connection_of(context)
        if connection is not None:
            await self._serve_socket(connection, kind)
            return
        async for response in self.serve(requests):
            yield response

    async def _serve_socket(self, connection: FrameSocket, kind: Any) -> None:
        """Serve a stream whose frames use a socket, until it ends."""
        ended: asyncio.Future[None] = self._loop.create_future()
        stream = SocketStream(connection, kind, lambda error: self._loop.call_soon_threadsafe(_resolve, ended, error))
        self._ends.add(end := partial(_resolve, ended, None))
        try:
            await asyncio.wrap_future(self._engine.call(partial(self._socket_streams.begin, stream)))
            await ended
        finally:
            self._ends.discard(end)
            # The callback closes the connection even if the engine has stopped and does not end the stream.
            self._engine.call(partial(self._socket_streams.end, stream)).add_done_callback(lambda _: connection.close())

    async def serve(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Response, None]:
        """Serve a stream through gRPC: read its frames, yield the responses, close its sessions at the end."""
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
            log.warning("a stream is closed, because a frame cannot be decoded: %s", error.message)
            raise


def _resolve(ended: asyncio.Future[None], error: Exception | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
