"""Frames of a stream past gRPC, between two processes of one machine.

A stream is a gRPC call: its beginning, its end and its status are gRPC's. But a message through it costs each end
several tenths of a millisecond of processor time and changes threads twice, which on one machine is most of a frame's
way. So a service that listens on a Unix domain socket has a second socket beside it, over which frames go as they are,
each behind its length in 4 bytes, little-endian:

    client   connects to it and writes a token ──► service keeps the connection (socket_acceptor.py)
    client   opens the stream, the same token in its metadata ──► service finds the connection; frames go over it
    either   closes the connection when its call has ended, and ends the call when the connection has

Where there is no such socket, frames go through the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections import deque
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequest
from outrider.process.ports import socket_path

MAX_MESSAGE_BYTES = 64 << 20
"""Longest frame."""

METADATA = "outrider-pipe"
"""Key of the token in a call's metadata."""

TOKEN_BYTES = 32
"""Bytes of a token: hexadecimal digits."""

PATIENCE = 5.0
"""Seconds in which what belongs together must come together."""

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18  # at once


def socket_beside(address: str) -> str | None:
    """Path of the socket for frames beside a gRPC address; None unless that is "unix:path"."""
    path = socket_path(address)
    return None if path is None else path + ".frames"


def message_of(kind: Any, frame: bytes) -> Any:
    """A frame as a message of a kind. Raises InvalidRequest for one that is none."""
    try:
        return kind.FromString(frame)
    except DecodeError:
        raise InvalidRequest(f"a frame is no {kind.DESCRIPTOR.name}") from None


class FrameSocket:
    """A connection over which whole frames go. Nothing here waits: who wants to must watch its `file`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._space = bytearray(_READ_BYTES)
        self._came = bytearray()  # of a frame that has not come whole
        self._left: memoryview | None = None  # of one that has not gone whole
        self.file = connection.fileno()

    @property
    def unsent(self) -> bool:
        """Part of a frame has yet to go: `flush` once there is room."""
        return self._left is not None

    def receive(self) -> list[bytes]:
        """Frames that have come. Raises EOFError at the connection's end, InvalidRequest for too long a frame."""
        try:
            count = self._socket.recv_into(self._space)
        except BlockingIOError:
            return []
        except OSError:
            raise EOFError from None
        if not count:
            raise EOFError
        # Behind what has come the space has what came before.
        if not self._came and count >= _LENGTH_BYTES and count == _LENGTH_BYTES + self._size(self._space, 0):
            return [bytes(self._space[_LENGTH_BYTES:count])]  # one frame, as mostly
        self._came += memoryview(self._space)[:count]
        return self._whole_frames()

    def _whole_frames(self) -> list[bytes]:
        frames, start, come = [], 0, self._came
        while len(come) - start >= _LENGTH_BYTES:
            stop = start + _LENGTH_BYTES + self._size(come, start)
            if stop > len(come):
                break
            frames.append(bytes(memoryview(come)[start + _LENGTH_BYTES : stop]))
            start = stop
        if start:
            del come[:start]
        return frames

    @staticmethod
    def _size(content: bytearray, start: int) -> int:
        size = int.from_bytes(content[start : start + _LENGTH_BYTES], "little")
        if size > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"a frame of {size} bytes is longer than {MAX_MESSAGE_BYTES}")
        return size

    def send(self, frame: bytes) -> None:
        """Send a frame, or as much of it as there is room for. Raises ConnectionError if the other side has gone."""
        assert self._left is None, "frames go one after the other"
        head = len(frame).to_bytes(_LENGTH_BYTES, "little")
        try:
            sent = self._socket.sendmsg((head, frame))
        except BlockingIOError:
            sent = 0
        if sent < _LENGTH_BYTES + len(frame):
            self._left = memoryview(head + frame)[sent:]

    def flush(self) -> None:
        """Send more of what is left. Raises ConnectionError if the other side has gone."""
        if self._left is None:
            return
        with contextlib.suppress(BlockingIOError):
            sent = self._socket.send(self._left)
            self._left = self._left[sent:] if sent < len(self._left) else None

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class SocketCall:
    """The client's side: a stream call, read and written like grpc.aio's, whose frames go past it."""

    def __init__(self, call: Any, pipe: FrameSocket, kind: Any) -> None:
        """kind: of the messages that come."""
        self._call = call
        self._pipe = pipe
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._frames: deque[bytes] = deque()
        self._ended: EOFError | InvalidRequest | None = None
        self._reader: asyncio.Future[None] | None = None  # who waits for a frame
        self._room: asyncio.Future[None] | None = None  # who waits for the last frame to go
        self._loop.add_reader(pipe.file, self._come)
        call.add_done_callback(lambda _: self._end(EOFError()))

    def _come(self) -> None:
        try:
            self._frames += self._pipe.receive()
        except (EOFError, InvalidRequest) as error:
            self._end(error)
        else:
            _wake(self._reader)

    def _end(self, why: EOFError | InvalidRequest) -> None:
        if self._ended is None:
            self._ended = why
            self._loop.remove_reader(self._pipe.file)
            self._loop.remove_writer(self._pipe.file)
            self._pipe.close()
            _wake(self._reader)
            _wake(self._room)

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF. Raises AioRpcError if the call ended with an error, InvalidRequest for a
        frame that is none.
        """
        while not self._frames:
            if isinstance(self._ended, InvalidRequest):
                raise self._ended
            if self._ended is not None:
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(self._call.read(), PATIENCE)  # it says why
                return grpc.aio.EOF
            self._reader = self._loop.create_future()
            await self._reader
        return message_of(self._kind, self._frames.popleft())

    async def write(self, message: Any) -> None:
        """Send a message; waits while the other side is slow to read. Raises asyncio.InvalidStateError once the stream
        has ended.
        """
        if self._ended is None:
            self._send(message.SerializeToString())
        while self._ended is None and self._pipe.unsent:
            self._room = self._loop.create_future()
            self._loop.add_writer(self._pipe.file, self._flush)
            await self._room
        if self._ended is not None:
            raise asyncio.InvalidStateError("the stream has ended")

    def _send(self, frame: bytes) -> None:
        try:
            self._pipe.send(frame)
        except OSError:
            self._end(EOFError())

    def _flush(self) -> None:
        try:
            self._pipe.flush()
        except OSError:
            self._end(EOFError())
            return
        if not self._pipe.unsent:
            self._loop.remove_writer(self._pipe.file)
            _wake(self._room)

    def cancel(self) -> None:
        """End the stream."""
        self._end(EOFError())
        self._call.cancel()


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class FrameSocketKey(NamedTuple):
    """A connection that was made, and the metadata of the call that shall have it."""

    pipe: FrameSocket
    metadata: tuple[tuple[str, str], ...]


async def connect_beside(address: str) -> FrameSocketKey | None:
    """A connection for frames to the service at a gRPC address; None if it has none to offer."""
    path = socket_beside(address)
    if path is None:
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    token = secrets.token_hex(TOKEN_BYTES // 2)
    try:
        await asyncio.get_running_loop().sock_connect(connection, path)
        connection.send(token.encode())
    except OSError:
        connection.close()
        return None
    return FrameSocketKey(FrameSocket(connection), ((METADATA, token),))
