"""The listeners of a gateway process: REST, gRPC, health and the control socket.

A worker that stops leaves the ports that others share.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admission.admission import Keys
from gateway.api.middleware import LOCAL
from gateway.process.connections import BoundedHttp, Connections, possible_connections
from gateway.process.slow_readers import end_slow_readers
from outrider.config import GatewayConfig
from outrider.process.ports import host_and_port, take_port, take_private_socket
from outrider.tls import ServerTls
from outrider.transport.guard import Limits
from outrider.transport.rpc import GrpcServer
from outrider.wire.v1 import draft_pb2, target_pb2

TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
_PUBLIC_METHODS = (
    "/vllm.grpc.engine.VllmEngine/HealthCheck",
    "/sglang.grpc.scheduler.SglangScheduler/HealthCheck",
)
_OTHER_CALLS = 64  # beside the pending requests, in one connection
_CONNECTIONS = 8192  # of gRPC
_GRACE = 5  # seconds for running requests to end when the gateway stops
_KEEP_ALIVE = 75  # seconds without a request; a client must not use a connection as it is closed: aiohttp keeps 15 s
_CONTROL_CONNECTIONS = 64  # over the control socket


class Listeners:
    """Servers of one process. Use: add services to `grpc.server`, `open`, `set_serving`, `close`."""

    def __init__(
        self, config: GatewayConfig, app: ASGIApp, keys: Keys, unread: Callable[[], None], *, shared: bool = False
    ) -> None:
        """app: answers HTTP. keys: of gRPC's callers. unread: counts answers that are cut because they are not read.

        shared: other processes listen on the same ports
        """
        self.grpc = _grpc_server(config, keys, shared=shared)
        self._config = config
        self._app = app
        self._unread = unread
        self._shared = shared
        self._health = GrpcServer() if config.health_listen is not None else None
        self._rest: RestServer | None = None
        self._control: RestServer | None = None
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
        limits = Connections(possible_connections(config.max_connections), config.client_timeout, self._unread)
        self._rest = start_rest(self._app, listening, tls, limits)
        connections = self._rest[0].server_state.connections
        self._watching = asyncio.create_task(end_slow_readers(connections, config.slow_reader_timeout))
        self._open = True
        if config.control_socket is not None:
            private = take_private_socket(config.control_socket, "--control-socket")
            limits = Connections(_CONTROL_CONNECTIONS, config.client_timeout, self._unread)
            self._control = start_rest(_Local(self._app), private, None, limits)
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
            # gRPC also asks its clients to reconnect elsewhere; `close` ends the wait for their calls.
            self._draining = asyncio.create_task(self.grpc.stop(self._config.drain_timeout + _GRACE))

    async def close(self) -> None:
        """Stop; running requests get a grace period."""
        if self._watching is not None:
            self._watching.cancel()
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.wait([self._draining])
        servers = [server for server in (self.grpc if self._open else None, self._health) if server is not None]
        rest = [stop_rest(server) for server in (self._rest, self._control) if server is not None]
        await asyncio.gather(*rest, *(server.stop() for server in servers))


def _grpc_server(config: GatewayConfig, keys: Keys, *, shared: bool) -> GrpcServer:
    """The server of the gRPC port, which checks keys before it reads messages."""

    def check(metadata: Mapping[str, Any]) -> None:
        keys.check(str(metadata.get("authorization", "")).encode())

    # A message that is a little too large is read, so that its sender gets the reason from the handler.
    limits = Limits(2 * config.max_body_bytes, config.max_pending_requests + _OTHER_CALLS, _CONNECTIONS, sizes=None)
    return GrpcServer(shared=shared, check=check, public=_PUBLIC_METHODS, limits=limits)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the process, and bounds the time of TLS handshakes."""

    handshake_timeout: float | None = None  # seconds; None without TLS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on the sockets."""
        config, loop = self.config, asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            made: Any = config.http_protocol_class
            return made(config=config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[no-any-return]

        self.servers = [
            await loop.create_server(
                protocol, sock=one, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=self.handshake_timeout
            )
            for one in sockets or ()
        ]
        self.started = True

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


RestServer = tuple[_Server, asyncio.Task[None]]


class _Local:
    """Marks requests as sent over the control socket, which only this user can open."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        scope[LOCAL] = True
        await self._app(scope, receive, send)


def start_rest(app: ASGIApp, listener: socket.socket, tls: ServerTls | None, limits: Connections) -> RestServer:
    """Serve HTTP on a socket, or HTTPS with tls."""
    files: dict[str, Any] = {}
    if tls is not None:
        files = {"ssl_certfile": tls.pair.certfile, "ssl_keyfile": tls.pair.keyfile, "ssl_ca_certs": tls.ca_certs}
        files["ssl_cert_reqs"] = tls.cert_reqs
    protocol: Any = partial(BoundedHttp, limits)
    settings = uvicorn.Config(
        app, http=protocol, log_config=None, access_log=False, lifespan="off", ws="none",
        timeout_keep_alive=_KEEP_ALIVE, timeout_graceful_shutdown=_GRACE, **files,
    )  # fmt: skip
    server = _Server(settings)
    server.handshake_timeout = limits.timeout if tls is not None else None
    return server, asyncio.create_task(server.serve(sockets=[listener]), name="rest")


async def stop_rest(rest_server: RestServer) -> None:
    """Stop serving HTTP; running requests get a grace period."""
    server, task = rest_server
    server.should_exit = True
    await task
