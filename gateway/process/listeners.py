"""The listeners of a gateway process: REST, gRPC and health. A worker that stops leaves the ports that others share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gateway.process.slow_readers import end_slow_readers
from outrider.config import GatewayConfig
from outrider.process.ports import host_and_port, take_port
from outrider.tls import ServerTls
from outrider.transport.rpc import GrpcServer
from outrider.wire.v1 import draft_pb2, target_pb2

TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
_GRACE = 5  # seconds for running requests to end when the gateway stops


class Listeners:
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
        self._watching: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None

    async def start_health(self) -> None:
        """Listen on --health-listen. Raises ConfigError if the address cannot be used."""
        if self._health is not None:
            await self._health.start(self._config.health_listen or "", ())

    async def open(self, names: Sequence[str], tls: ServerTls | None) -> None:
        """Listen on the ports of REST and gRPC; the app answers from now on. Raises ConfigError for ports in use.

        names: of the gRPC services that were added
        """
        config = self._config
        listening = take_port(config.host, config.port, "--port", shared=self._shared, listens=True)
        self._rest = start_rest(self._app, listening, tls)
        connections = self._rest[0].server_state.connections
        self._watching = asyncio.create_task(end_slow_readers(connections, config.slow_reader_timeout))
        self._open = True
        await self.grpc.start(host_and_port(config.host, config.grpc_port), names, tls)

    async def report(self, *, ready: bool, draft: bool) -> None:
        """Set the health status: of the gateway, which is ready while a target is up, and of the services behind it."""
        for server in (self.grpc, self._health):
            if server is not None:
                await server.set_serving(ready)
                await server.set_status(TARGET_SERVICE, ready)
                await server.set_status(DRAFT_SERVICE, draft)

    async def set_serving(self, serving: bool) -> None:
        """Set the health status. A process that no longer serves stops listening on shared ports."""
        await self.report(ready=serving, draft=False)
        if self._shared and not serving and self._rest is not None:
            self._rest[0].stop_accepting()
            # gRPC also tells its clients to reconnect elsewhere; `close` ends the wait for their calls.
            self._draining = asyncio.create_task(self.grpc.stop(self._config.drain_timeout + _GRACE))

    async def close(self) -> None:
        """Stop; running requests get a grace period."""
        if self._watching is not None:
            self._watching.cancel()
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.wait([self._draining])
        servers = [server for server in (self.grpc if self._open else None, self._health) if server is not None]
        rest = [stop_rest(self._rest)] if self._rest is not None else []
        await asyncio.gather(*rest, *(server.stop() for server in servers))


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    def stop_accepting(self) -> None:
        """Accept no more connections, and close each existing one after its running request."""
        for listening in self.servers:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()


def start_rest(
    app: ASGIApp, listener: socket.socket, tls: ServerTls | None = None
) -> tuple[_Server, asyncio.Task[None]]:
    """Serve HTTP on a socket, or HTTPS with tls."""
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
    """Stop serving HTTP; running requests get a grace period."""
    server, task = rest_server
    server.should_exit = True
    await task
