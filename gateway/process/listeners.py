"""The ports of the gateway: REST, gRPC, and health alone. A worker that stops leaves the port that others share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from outrider.config import GatewayConfig
from outrider.process.ports import host_and_port, take_port
from outrider.tls import ServerTls
from outrider.transport.rpc import GrpcServer

_GRACE = 5  # seconds that requests get to end when the gateway stops


class Doors:
    """Servers of one process. Use: add services to `grpc.server`, `open`, `set_serving`, `close`."""

    def __init__(self, config: GatewayConfig, app: ASGIApp, *, shared: bool = False) -> None:
        """app: answers HTTP. shared: other processes listen on the same ports."""
        self.grpc = GrpcServer(shared=shared)
        self._config = config
        self._app = app
        self._shared = shared
        self._health = GrpcServer() if config.health_listen is not None else None
        self._rest: tuple[_Server, asyncio.Task[None]] | None = None
        self._open = False
        self._leaving: asyncio.Task[None] | None = None

    async def start_health(self) -> None:
        """Listen where health alone is asked. Raises ConfigError if that cannot be."""
        if self._health is not None:
            await self._health.start(self._config.health_listen or "", ())

    async def open(self, names: Sequence[str], tls: ServerTls | None) -> None:
        """Listen where clients come; the app answers from now on. Raises ConfigError for ports in use.

        names: of the gRPC services that were added.
        """
        config = self._config
        listening = take_port(config.host, config.port, "--port", shared=self._shared, listens=True)
        self._rest = start_rest(self._app, listening, tls)
        self._open = True
        await self.grpc.start(host_and_port(config.host, config.grpc_port), names, tls)

    async def set_serving(self, serving: bool) -> None:
        """What health says. A process that serves no longer leaves ports that others share."""
        for server in (self.grpc, self._health):
            if server is not None:
                await server.set_serving(serving)
        if self._shared and not serving and self._rest is not None:
            self._rest[0].leave()
            # gRPC tells its connections, too, that they shall come no more; `close` ends the wait for their calls.
            self._leaving = asyncio.create_task(self.grpc.stop(self._config.drain_timeout + _GRACE))

    async def close(self) -> None:
        """Stop; what is under way gets a moment."""
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.wait([self._leaving])
        servers = [server for server in (self.grpc if self._open else None, self._health) if server is not None]
        rest = [stop_rest(self._rest)] if self._rest is not None else []
        await asyncio.gather(*rest, *(server.stop() for server in servers))


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    def leave(self) -> None:
        """Take no more connections, and end each that there is after what is under way on it."""
        for listening in self.servers:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()


def start_rest(
    app: ASGIApp, listener: socket.socket, tls: ServerTls | None = None
) -> tuple[_Server, asyncio.Task[None]]:
    """Answer HTTP on a socket, or HTTPS."""
    files: dict[str, Any] = {}
    if tls is not None:
        files = {"ssl_certfile": tls.pair.certfile, "ssl_keyfile": tls.pair.keyfile, "ssl_ca_certs": tls.ca_certs}
        files["ssl_cert_reqs"] = tls.cert_reqs
    settings = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=_GRACE, **files
    )
    server = _Server(settings)
    return server, asyncio.create_task(server.serve(sockets=[listener]), name="rest")


async def stop_rest(rest_server: tuple[_Server, asyncio.Task[None]]) -> None:
    """Stop answering HTTP; what is under way gets a moment."""
    server, task = rest_server
    server.should_exit = True
    await task
