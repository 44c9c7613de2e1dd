"""Frames of a stream over a Unix socket beside gRPC, between two processes of one machine.

A stream is a gRPC call, with gRPC's beginning, end and status. A message through gRPC costs each end several tenths of
a millisecond of processor time and two changes of threads, which is most of a frame's latency on one machine. A service
on a Unix domain socket therefore listens on a second socket beside it. Its frames are the serialized messages, each
after its length in 4 bytes, little-endian:

    client   connects to the second socket and writes a token ──► service keeps the connection (socket_acceptor.py)
    client   opens the call with the same token in its metadata ──► service pairs both; frames use the connection
    either   closes the connection when its call ends, and ends the call when the connection ends

Without such a socket, frames go through the call.
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
"""Maximum size of a frame."""

TOKEN_METADATA = "outrider-pipe"
"""Key of the token in a call's metadata."""

TOKEN_BYTES = 32
"""Length of a token: hexadecimal digits."""

PAIRING_SECONDS = 5.0
"""Seconds within which a connection and its call must both arrive."""

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18  # of one read


def socket_beside(address: str) -> str | None:
    """Path of the socket for frames beside a gRPC address; None unless the address is "unix:path"."""
    path = socket_path(address)
    return None if path is None else path + ".frames"


def message_of(kind: Any, frame: bytes) -> Any:
    """Parse a frame. kind: class of the message. Raises InvalidRequest if it cannot be parsed."""
    try:
        return kind.FromString(frame)
    except DecodeError:
        raise InvalidRequest(f"a frame cannot be parsed as {kind.DESCRIPTOR.name}") from None


class FrameSocket:
    """A connection that carries whole frames. No method blocks; to wait, poll `file`, its descriptor."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._buffer = bytearray(_READ_BYTES)
        self._received = bytearray()  # beginning of an incomplete frame
        self._unsent_part: memoryview | None = None  # rest of a frame that was sent in part
        self.file = connection.fileno()

    @property
    def unsent(self) -> bool:
        """True if part of a frame is unsent: call `flush` once the connection can be written."""
        return self._unsent_part is not None

    def receive(self) -> list[bytes]:
        """Received frames. Raises EOFError at the end of the connection, InvalidRequest for too long a frame."""
        try:
            count = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return []
        except OSError:
            raise EOFError from None
        if not count:
            raise EOFError
        # The buffer holds older bytes after the first `count`.
        if not self._received and count >= _LENGTH_BYTES and count == _LENGTH_BYTES + self._size(self._buffer, 0):
            return [bytes(self._buffer[_LENGTH_BYTES:count])]  # exactly one frame, the usual case
        self._received += memoryview(self._buffer)[:count]
        return self._whole_frames()

    def _whole_frames(self) -> list[bytes]:
        frames, start, come = [], 0, self._received
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
        """Send a frame, or as much of it as the connection takes. Raises ConnectionError if the peer has closed it."""
        assert self._unsent_part is None, "a frame is sent after the one before it"
        head = len(frame).to_bytes(_LENGTH_BYTES, "little")
        try:
            sent = self._socket.sendmsg((head, frame))
        except BlockingIOError:
            sent = 0
        if sent < _LENGTH_BYTES + len(frame):
            self._unsent_part = memoryview(head + frame)[sent:]

    def flush(self) -> None:
        """Send more of the unsent part. Raises ConnectionError if the peer has closed the connection."""
        if self._unsent_part is None:
            return
        with contextlib.suppress(BlockingIOError):
            sent = self._socket.send(self._unsent_part)
            self._unsent_part = self._unsent_part[sent:] if sent < len(self._unsent_part) else None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class SocketCall:
    """The client's side: a stream call with grpc.aio's methods, whose frames use a socket."""

    def __init__(self, call: Any, connection: FrameSocket) -> None:
        self._call = call
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._frames: deque[bytes] = deque()
        self._ended: EOFError | InvalidRequest | None = None
        self._reader: asyncio.Future[None] | None = None  # `read` waits for it
        self._room: asyncio.Future[None] | None = None  # `write` waits for it, until the last frame is sent
        self._loop.add_reader(connection.file, self._on_readable)
        call.add_done_callback(lambda _: self._end(EOFError()))

    def _on_readable(self) -> None:
        try:
            self._frames += self._connection.receive()
        except (EOFError, InvalidRequest) as error:
            self._end(error)
        else:
            _wake(self._reader)

    def _end(self, why: EOFError | InvalidRequest) -> None:
        if self._ended is None:
            self._ended = why
            self._loop.remove_reader(self._connection.file)
            self._loop.remove_writer(self._connection.file)
            self._connection.close()
            _wake(self._reader)
            _wake(self._room)

    async def read(self) -> Any:
        """The next frame, or grpc.aio.EOF. Raises AioRpcError if the call ended with an error, InvalidRequest for too
        long a frame.
        """
        while not self._frames:
            if isinstance(self._ended, InvalidRequest):
                raise self._ended
            if self._ended is not None:
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(self._call.read(), PAIRING_SECONDS)  # raises the call's error
                return grpc.aio.EOF
            self._reader = self._loop.create_future()
            await self._reader
        return self._frames.popleft()

    async def write(self, frame: bytes) -> None:
        """Send a frame; waits while the peer is slow to read. Raises asyncio.InvalidStateError if the stream has
        ended.
        """
        if self._ended is None:
            self._send(frame)
        while self._ended is None and self._connection.unsent:
            self._room = self._loop.create_future()
            self._loop.add_writer(self._connection.file, self._flush)
            await self._room
        if self._ended is not None:
            raise asyncio.InvalidStateError("the stream has ended")

    def _send(self, frame: bytes) -> None:
        try:
            self._connection.send(frame)
        except OSError:
            self._end(EOFError())

    def _flush(self) -> None:
        try:
            self._connection.flush()
        except OSError:
            self._end(EOFError())
            return
        if not self._connection.unsent:
            self._loop.remove_writer(self._connection.file)
            _wake(self._room)

    def cancel(self) -> None:
        """End the stream."""
        self._end(EOFError())
        self._call.cancel()


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class FrameSocketKey(NamedTuple):
    """A new connection, and the metadata of the call that it belongs to."""

    connection: FrameSocket
    metadata: tuple[tuple[str, str], ...]


async def connect_beside(address: str) -> FrameSocketKey | None:
    """Connect for frames to the service at a gRPC address; None if the service has no socket for frames."""
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
    return FrameSocketKey(FrameSocket(connection), ((TOKEN_METADATA, token),))
