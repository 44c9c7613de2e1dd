"""Where connections for frames come in (frame_socket.py), and how each finds the call that it belongs to."""

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
from outrider.transport.frame_socket import METADATA, PATIENCE, TOKEN_BYTES, FrameSocket, socket_beside

log = logging.getLogger(__name__)

_BACKLOG = 100  # connections that wait to be taken
_PAUSE = 1.0  # seconds after a failure to take one


class SocketAcceptor:
    """Takes connections, and finds the one that belongs to a call. Lives in the network thread."""

    def __init__(self) -> None:
        self._met: dict[str, asyncio.Future[FrameSocket]] = {}  # by token; either side may come first
        self._server: asyncio.Task[None] | None = None
        self._visitors: set[asyncio.Task[None]] = set()
        self._path = ""

    async def open(self, address: str) -> None:
        """Listen beside a gRPC address, if that is a Unix domain socket. Without it, frames go through gRPC.

        Raises ConfigError if another process listens there: it would take the connections, and lose the frames.
        """
        path = socket_beside(address)
        if path is None:
            return
        refuse_used_socket(path)
        try:
            listening = _listen(path)
        except OSError as error:  # such as a path that is too long
            log.info("frames go through gRPC, for %s cannot be had: %s", path, error)
        else:
            self._path = path
            self._server = asyncio.create_task(self._serve(listening))

    async def close(self) -> None:
        """Take no more, and end the connections that no call has claimed."""
        if self._server is not None:
            tasks = [self._server, *self._visitors]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        for token in list(self._met):
            self._forget(token)

    async def pipe_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> FrameSocket | None:
        """The connection for a call's frames; None if they come through the call. Raises Unavailable without it."""
        token = dict(context.invocation_metadata() or ()).get(METADATA)
        if token is None:
            return None
        try:
            return await asyncio.wait_for(self._place(str(token)), PATIENCE)
        except TimeoutError:
            raise Unavailable("the connection for the stream's frames has not come") from None
        finally:
            self._met.pop(str(token), None)

    async def _serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError as error:  # such as too many open files, which may pass
                    log.warning("a connection for frames cannot be taken: %s", error.strerror or error)
                    await asyncio.sleep(_PAUSE)
                    continue
                visitor = loop.create_task(self._take(connection))
                self._visitors.add(visitor)
                visitor.add_done_callback(self._visitors.discard)

    async def _take(self, connection: socket.socket) -> None:
        place = None
        try:
            token = await asyncio.wait_for(_token(connection), PATIENCE)
            place = self._place(token)
            asyncio.get_running_loop().call_later(PATIENCE, self._forget, token)
        except (EOFError, OSError, TimeoutError, UnicodeDecodeError):
            log.debug("a connection for frames ended before it said whose they are")
        finally:
            if place is None or place.done():
                connection.close()
            else:
                place.set_result(FrameSocket(connection))

    def _place(self, token: str) -> asyncio.Future[FrameSocket]:
        return self._met.setdefault(token, asyncio.get_running_loop().create_future())

    def _forget(self, token: str) -> None:
        """No call has come for a connection."""
        future = self._met.pop(token, None)
        if future is not None and future.done() and not future.cancelled():
            future.result().close()


def _listen(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # left behind by a process that has gone
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
