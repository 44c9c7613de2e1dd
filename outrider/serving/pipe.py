"""Frames of a stream past gRPC, between two processes of one machine.

A stream is a gRPC call: its beginning, its end and its status are gRPC's. But a message through it costs each end
several tenths of a millisecond of processor time and changes threads twice, which on one machine is most of a frame's
way. So a service that listens on a Unix domain socket has a second socket beside it, over which frames go as they are,
each behind its length in 4 bytes, little-endian:

    client   connects to it and writes a token ──► service keeps the connection
    client   opens the stream, the same token in its metadata ──► service finds the connection; frames go over it
    either   closes the connection when its call has ended, and ends the call when the connection has

Where there is no such socket, frames go through the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Longest frame."""

_METADATA = "outrider-pipe"
_TOKEN_BYTES = 16  # two digits each
_LENGTH_BYTES = 4
_BUFFERED = 1 << 20  # bytes that are read ahead
_PATIENCE = 5.0  # seconds in which what belongs together must come together


def socket_beside(address: str) -> str | None:
    """Path of the socket for frames beside a gRPC address; None unless that is "unix:path"."""
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    return (path[2:] if path.startswith("//") else path) + ".frames"


class Pipe:
    """A connection over which whole frames go."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes | None:
        """The next frame; None once the connection has ended. Raises InvalidRequest for one that is too long."""
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
            if size > MAX_MESSAGE_BYTES:
                raise InvalidRequest(f"a frame of {size} bytes is longer than {MAX_MESSAGE_BYTES}")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def write(self, message: Any) -> None:
        """Send a message; waits while the other side is slow to read. Raises ConnectionError if it has gone."""
        frame: bytes = message.SerializeToString()
        self._writer.writelines((len(frame).to_bytes(_LENGTH_BYTES, "little"), frame))
        await self._writer.drain()

    async def messages(self, kind: Any) -> AsyncIterator[Any]:
        """Frames as messages of a kind, until the end. Raises InvalidRequest for one that is none."""
        while (frame := await self.read()) is not None:
            yield _message(kind, frame)

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


def _message(kind: Any, frame: bytes) -> Any:
    try:
        return kind.FromString(frame)
    except DecodeError:
        raise InvalidRequest(f"a frame is no {kind.DESCRIPTOR.name}") from None


class PipeDoor:
    """The service's side: takes connections, and finds the one that belongs to a call."""

    def __init__(self) -> None:
        self._met: dict[str, asyncio.Future[Pipe]] = {}  # by token; either side may come first
        self._server: asyncio.Server | None = None
        self._path = ""
        self._closed = False

    async def open(self, address: str) -> None:
        """Listen beside a gRPC address, if that is a Unix domain socket. Without it, frames go through gRPC."""
        path = socket_beside(address)
        if path is None:
            return
        try:
            self._server = await asyncio.start_unix_server(self._take, path, limit=_BUFFERED)
        except OSError as error:  # such as a path that is too long
            log.info("frames go through gRPC, for %s cannot be had: %s", path, error)
        else:
            self._path = path

    async def close(self) -> None:
        """Take no more, and end the connections that no call has claimed."""
        self._closed = True
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        for token in list(self._met):
            self._forget(token)

    async def pipe_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> Pipe | None:
        """The connection for a call's frames; None if they come through the call. Raises Unavailable without it."""
        token = dict(context.invocation_metadata() or ()).get(_METADATA)
        if token is None:
            return None
        try:
            return await asyncio.wait_for(self._place(str(token)), _PATIENCE)
        except TimeoutError:
            raise Unavailable("the connection for the stream's frames has not come") from None
        finally:
            self._met.pop(str(token), None)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pipe, place = Pipe(reader, writer), None
        try:
            token = (await asyncio.wait_for(reader.readexactly(2 * _TOKEN_BYTES), _PATIENCE)).decode("ascii")
            place = self._place(token)
            asyncio.get_running_loop().call_later(_PATIENCE, self._forget, token)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, UnicodeDecodeError):
            log.debug("a connection for frames ended before it said whose they are")
        finally:
            if place is None or place.done() or self._closed:
                pipe.close()
            else:
                place.set_result(pipe)

    def _place(self, token: str) -> asyncio.Future[Pipe]:
        return self._met.setdefault(token, asyncio.get_running_loop().create_future())

    def _forget(self, token: str) -> None:
        """No call has come for a connection."""
        future = self._met.pop(token, None)
        if future is not None and future.done() and not future.cancelled():
            future.result().close()


class PipedCall:
    """The client's side: a stream call, read and written like grpc.aio's, whose frames go past it."""

    def __init__(self, call: Any, pipe: Pipe, kind: Any) -> None:
        """kind: of the messages that come."""
        self._call = call
        self._pipe = pipe
        self._kind = kind
        call.add_done_callback(lambda _: pipe.close())

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF. Raises AioRpcError if the call ended with an error."""
        frame = await self._pipe.read()
        if frame is not None:
            return _message(self._kind, frame)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._call.read(), _PATIENCE)  # it says why
        return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        """Send a message. Raises asyncio.InvalidStateError once the stream has ended."""
        try:
            await self._pipe.write(message)
        except ConnectionError:
            raise asyncio.InvalidStateError("the stream has ended") from None

    def cancel(self) -> None:
        """End the stream."""
        self._pipe.close()
        self._call.cancel()


class PipeKey(NamedTuple):
    """A connection that was made, and the metadata of the call that shall have it."""

    pipe: Pipe
    metadata: tuple[tuple[str, str], ...]


async def connect_beside(address: str) -> PipeKey | None:
    """A connection for frames to the service at a gRPC address; None if it has none to offer."""
    path = socket_beside(address)
    if path is None:
        return None
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=_BUFFERED)
    except OSError:
        return None
    token = secrets.token_hex(_TOKEN_BYTES)
    writer.write(token.encode())
    return PipeKey(Pipe(reader, writer), ((_METADATA, token),))
