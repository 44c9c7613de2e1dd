"""Accepts connections for frames (frame_socket.py) and pairs each with its gRPC call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from typing import Any

import grpc

from outrider.errors import Unavailable
from outrider.process.ports import refuse_used_socket
from outrider.transport.frame_socket import PAIRING_SECONDS, TOKEN_BYTES, TOKEN_METADATA, FrameSocket, socket_beside

log = logging.getLogger(__name__)

_BACKLOG = 100  # connections that wait to be accepted
_RETRY_SECONDS = 1.0  # after a failure to accept a connection


class SocketAcceptor:
    """Accepts connections and pairs them with calls. Runs in the network thread."""

    def __init__(self) -> None:
        self._connections: dict[str, asyncio.Future[FrameSocket]] = {}  # by token; either side may arrive first
        self._server: asyncio.Task[None] | None = None
        self._incoming: set[asyncio.Task[None]] = set()
        self._path = ""

    @property
    def unpaired(self) -> int:
        """Number of connections without a call, and calls without a connection."""
        return len(self._connections)

    async def open(self, address: str) -> None:
        """Listen on the socket beside a gRPC address, if the address is a Unix domain socket; else frames use gRPC.

        Raises ConfigError if another process listens on that socket: it would accept the connections and lose the
        frames.
        """
        path = socket_beside(address)
        if path is None:
            return
        refuse_used_socket(path)
        try:
            listening = _listen(path)
        except OSError as error:  # for example, the path is too long
            log.info("frames go through gRPC, because %s cannot be bound: %s", path, error)
        else:
            self._path = path
            self._server = asyncio.create_task(self._serve(listening))

    async def close(self) -> None:
        """Stop accepting, and close the connections that no call has claimed."""
        if self._server is not None:
            tasks = [self._server, *self._incoming]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        for token in list(self._connections):
            self._discard(token)

    async def connection_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> FrameSocket | None:
        """The connection for a call's frames; None if the frames use the call itself.

        Raises Unavailable if the announced connection does not arrive.
        """
        token = dict(context.invocation_metadata() or ()).get(TOKEN_METADATA)
        if token is None:
            return None
        try:
            return await asyncio.wait_for(self._connection_for(str(token)), PAIRING_SECONDS)
        except TimeoutError:
            raise Unavailable("the connection for the stream's frames did not arrive") from None
        finally:
            self._connections.pop(str(token), None)

    async def _serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError as error:  # for example too many open files, which may pass
                    log.warning("a connection for frames cannot be accepted: %s", error.strerror or error)
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                incoming = loop.create_task(self._take(connection))
                self._incoming.add(incoming)
                incoming.add_done_callback(self._incoming.discard)

    async def _take(self, connection: socket.socket) -> None:
        paired = None
        try:
            token = await asyncio.wait_for(_token(connection), PAIRING_SECONDS)
            paired = self._connection_for(token)
            asyncio.get_running_loop().call_later(PAIRING_SECONDS, self._discard, token)
        except (EOFError, OSError, TimeoutError, UnicodeDecodeError):
            log.debug("a connection for frames ended before it sent its token")
        finally:
            if paired is None or paired.done():
                connection.close()
            else:
                paired.set_result(FrameSocket(connection))

    def _connection_for(self, token: str) -> asyncio.Future[FrameSocket]:
        return self._connections.setdefault(token, asyncio.get_running_loop().create_future())

    def _discard(self, token: str) -> None:
        """Close a connection that no call has claimed."""
        future = self._connections.pop(token, None)
        if future is not None and future.done() and not future.cancelled():
            future.result().close()


def _listen(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # left behind by a dead process
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    listening.setblocking(False)
    return listening


async def _token(connection: socket.socket) -> str:
    loop, token = asyncio.get_running_loop(), b""
    while len(token) < TOKEN_BYTES:
        part = await loop.sock_recv(connection, TOKEN_BYTES - len(token))
        if not part:
            raise EOFError
        token += part
    return token.decode("ascii")
