"""The frames of one replica's stream: what carries them, when they are written, and how many there were.

Messages that arrive while a frame is being written are sent together in the next frame, and so are those of a gateway
that has more work than time (`spacing`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import grpc

from gateway.streams.connection import Connection
from gateway.streams.frames import FrameSignal
from gateway.streams.traffic import Count, Direction, Traffic
from outrider.errors import ConfigError
from outrider.transport.frame_socket import SocketCall, connect_beside, message_of, socket_beside
from outrider.transport.stream import PEER_METADATA

Frame = TypeVar("Frame")  # incoming frames
Metadata = Sequence[tuple[str, str]]


class StreamType(NamedTuple):
    """What is particular to a service's streams.

    method: full name of the stream's method. frame: message type of incoming frames
    features_are: in which frames hidden states travel
    """

    method: str
    frame: type[Any]
    features_are: Direction


class FrameStream(Generic[Frame]):
    """Outlives the calls that carry it, of which there is one at a time.

    transport: of the frames, grpc or socket; empty before the first call
    outgoing: set when a message waits to be sent
    on_frame: called with the incoming frames, one after the other
    traffic: counts of frames, which streams share
    spacing: seconds between two outgoing frames, by the load of the gateway
    """

    def __init__(self, service: str, kind: StreamType, address: str, connection: Connection) -> None:
        self._service, self._type, self._address = service, kind, address
        self._connection = connection
        self._peer = secrets.token_hex(16)
        self.transport = ""
        self.outgoing = FrameSignal()
        self.on_frame: Callable[[Frame], Awaitable[None]] = _ignore
        self.traffic = Traffic()
        self.spacing: Callable[[], float] = lambda: 0.0
        self._features = Count()

    async def start_call(self, channel: grpc.aio.Channel) -> Any:
        """Open the stream, whose frames are bytes. Raises ConfigError if they must use a socket and there is none."""
        call = await self._start_call(channel)
        self._features = self.traffic.count("features", self._type.features_are, self.transport)
        return call

    async def _start_call(self, channel: grpc.aio.Channel) -> Any:
        allowed = self._connection.transport
        key = None if allowed == "grpc" else await connect_beside(self._address)
        if key is not None:
            self.transport = "socket"
            return SocketCall(self.open_stream(channel, key.metadata), key.connection)
        if allowed == "socket":
            beside = socket_beside(self._address)
            where = "its address is no Unix domain socket" if beside is None else f"no process listens at {beside}"
            raise ConfigError(
                f"--stream-transport socket: the {self._service} at {self._address} cannot be reached that way, "
                f"because {where}; choose grpc or auto, or let the service listen on unix:/PATH of this machine"
            )
        self.transport = "grpc"
        return self.open_stream(channel, ())

    def open_stream(self, channel: grpc.aio.Channel, metadata: Metadata) -> Any:
        """The stream call; it reads and writes bytes."""
        return channel.stream_stream(self._type.method)(metadata=(*metadata, (PEER_METADATA, self._peer)))

    async def read(self, call: Any) -> None:
        """Process incoming frames until the call ends."""
        received = self.traffic.count(self._service, "received", self.transport)
        while (content := await call.read()) is not grpc.aio.EOF:
            frame = message_of(self._type.frame, content)
            self._count(received, "received", frame, len(content))
            await self.on_frame(frame)

    async def write(self, call: Any, take_frame: Callable[[], Any]) -> None:
        """Write frames when they are due. take_frame: returns the waiting messages as one frame."""
        outgoing, sent = self.outgoing, self.traffic.count(self._service, "sent", self.transport)
        clock, last = asyncio.get_running_loop().time, 0.0
        while True:
            await outgoing.wait()
            if (early := self.spacing() - (clock() - last)) > 0.0:
                await asyncio.sleep(early)
            outgoing.clear()
            last = clock()
            frame = take_frame()
            content = frame.SerializeToString()
            try:
                await call.write(content)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader receives the reason
            self._count(sent, "sent", frame, len(content))

    def _count(self, count: Count, direction: Direction, frame: Any, size: int) -> None:
        count.add(size)
        if self._type.features_are == direction and frame.features.rows:
            self._features.add(len(frame.features.rows))


async def _ignore(_: Any) -> None:
    """The default handler of frames."""
