"""Streams of an engine: each gateway has one bidirectional stream to it.

Frames are decoded and submitted to the engine loop. A step's output is routed to the streams that own its sessions;
while a stream is writing, the output of later steps collects in its next frame. A stream is the lease of its sessions:
when it ends, for any reason, they are closed. A peer has one stream, its newest.

The engine thread writes the frames (call_streams.py). The network thread reads and decodes those that use gRPC; the
engine thread reads those that use a socket (socket_streams.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

import grpc

from outrider.errors import InvalidRequest
from outrider.serving.loop import Arrival, EngineLoop
from outrider.serving.messages import StepOutput
from outrider.transport.call_streams import CallStream, CallStreams, CallWriter
from outrider.transport.frame_socket import FrameSocket
from outrider.transport.outbox import Routes
from outrider.transport.socket_acceptor import SocketAcceptor
from outrider.transport.socket_streams import Decode, Encode, Ended, Request, Response, SocketStream, SocketStreams

log = logging.getLogger(__name__)

PEER_METADATA = "outrider-peer"
"""Key of a secret random name in a stream's metadata, by which a client's next stream replaces this one."""


class StreamHub(Generic[Request, Response]):
    """Routes between an engine loop and its streams. All methods but `publish` run in the network thread.

    engine: the loop
    """

    def __init__(self, engine: EngineLoop, decode: Decode[Request], encode: Encode[Response]) -> None:
        """decode, encode: conversions between frames and domain types."""
        self.engine = engine
        self._decode = decode
        self._loop = asyncio.get_running_loop()
        self._ends: set[Callable[[], object]] = set()  # one for each stream: ends it
        self._routes = Routes()
        self._call_streams = CallStreams(engine, encode, self._routes)
        self._socket_streams = SocketStreams(engine.inbox, decode, encode, self._routes)
        self.acceptor = SocketAcceptor()

    def publish(self, output: StepOutput) -> None:
        """Route a step's output. Called in the engine thread, once a step."""
        self._routes.route(output)
        self._call_streams.write_all()
        self._socket_streams.write_all()

    @property
    def sessions(self) -> int:
        """Number of sessions that streams own."""
        return self._routes.sessions

    def close(self) -> None:
        """End all streams."""
        for end in list(self._ends):
            end()

    async def answer(self, context: grpc.aio.ServicerContext[Any, Any], kind: Any) -> None:
        """Serve a stream call until it ends. kind: class of the received messages."""
        peer = str(dict(context.invocation_metadata() or ()).get(PEER_METADATA, ""))
        connection = await self.acceptor.connection_of(context)
        if connection is not None:
            await self._serve_socket(connection, kind, peer)
        else:
            await self._serve_call(context, peer)

    async def _serve_socket(self, connection: FrameSocket, kind: Any, peer: str) -> None:
        """Serve a stream whose frames use a socket, until it ends."""
        ended: asyncio.Future[None] = self._loop.create_future()
        stream = SocketStream(connection, kind, self._ender(ended), peer)
        self._ends.add(end := partial(_resolve, ended, None))
        try:
            await asyncio.wrap_future(self.engine.call(partial(self._begin, self._socket_streams, stream)))
            await ended
        finally:
            self._ends.discard(end)
            # The callback closes the connection even if the engine has stopped and does not end the stream.
            self.engine.call(partial(self._socket_streams.end, stream)).add_done_callback(lambda _: connection.close())

    async def _serve_call(self, context: grpc.aio.ServicerContext[Any, Any], peer: str) -> None:
        """Serve a stream whose frames use gRPC, until it ends."""
        await context.send_initial_metadata(())  # so that a write and the call's end cannot both send it
        ended: asyncio.Future[None] = self._loop.create_future()
        stream = CallStream(CallWriter(context), self._ender(ended), peer)
        self._ends.add(end := partial(_resolve, ended, None))
        self.engine.call(partial(self._begin, self._call_streams, stream))
        reader = asyncio.create_task(self._read(context, stream))
        reader.add_done_callback(lambda _: end())
        try:
            await ended
            if reader.done() and not reader.cancelled():
                reader.result()
        finally:
            self._ends.discard(end)
            reader.cancel()
            self.engine.call(partial(self._call_streams.end, stream))

    def _begin(self, streams: CallStreams | SocketStreams, stream: Any) -> None:
        """Begin a stream in the engine thread. The older ones of its peer, whose loss is not seen here yet, end first:
        what arrives late on them must not touch sessions that the peer opens on the new one.
        """
        for older in self._routes.of_peer(stream.outbox.peer):
            log.info("a peer has a new stream, its older one ends")
            self._call_streams.drop(older)
            self._socket_streams.drop(older)
        streams.begin(stream)

    def _ender(self, ended: asyncio.Future[None]) -> Ended:
        """Completes a future from the engine thread."""
        return lambda error: self._loop.call_soon_threadsafe(_resolve, ended, error)

    async def _read(self, context: grpc.aio.ServicerContext[Any, Any], stream: CallStream) -> None:
        try:
            while (frame := await context.read()) is not grpc.aio.EOF:
                message, failures = self._decode(frame)
                # Proposals are of use for the next step; for a session that begins or ends, this one may end early.
                urgent = bool(message.opens or message.closes or failures)
                arrival = Arrival(message, partial(self._call_streams.admit, stream, failures))
                self.engine.submit(arrival, interrupts=urgent)
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
