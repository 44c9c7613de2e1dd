"""The gRPC server around an engine: health, reflection, errors as statuses, signals.

Start-up order: bind the port (health reports NOT_SERVING), build the engine, then report SERVING. An engine fault ends
the process, so that its supervisor restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from outrider.errors import ConfigError, Overloaded
from outrider.process.cpu_affinity import run_compute_on, run_network_on
from outrider.process.garbage_collection import frozen_heap
from outrider.process.ports import check_socket_path, refuse_used_socket, socket_path
from outrider.process.process import LoadingAborted
from outrider.process.startup import STARTUP
from outrider.service_token import token_check
from outrider.serving.loop import Engine, EngineLoop
from outrider.tls import ServerTls
from outrider.transport.frame_socket import MAX_MESSAGE_BYTES
from outrider.transport.guard import MAX_WATCHES, Check, Guard, Limits
from outrider.transport.socket_streams import Decode, Encode
from outrider.transport.statuses import PROGRESS, abort
from outrider.transport.stream import StreamHub

log = logging.getLogger(__name__)

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # default a minute; the longer of this and keepalive_timeout_ms applies
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_REUSE_PORT = "grpc.so_reuseport"
_DRAIN_POLL = 0.05  # seconds


class _Health(HealthServicer):  # type: ignore[misc]
    """Reports the progress of the start-up beside the status, to callers with a valid key."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.progress = ""
        self._guard = guard
        self._watches = 0

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Answer a health check, with the progress in the trailing metadata."""
        if self.progress and self._guard.permits(context.invocation_metadata()):
            context.set_trailing_metadata(((PROGRESS, _ascii(self.progress)),))
        answer: health_pb2.HealthCheckResponse = await super().Check(request, context)
        return answer

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Send the status whenever it changes. The number of these calls without a key is limited."""
        if self._guard.knows(context.invocation_metadata()):  # each gateway of a target watches it
            await super().Watch(request, context)
            return
        if self._watches >= MAX_WATCHES:
            await abort(context, Overloaded(f"{self._watches} callers watch this port's health, which is the limit"))
        self._watches += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watches -= 1


class GrpcServer:
    """A grpc.aio server with health and reflection. Use: add services to `server`, `start`, `set_serving`, `stop`."""

    def __init__(
        self,
        *,
        shared: bool = False,
        check: Check | None = None,
        public: Collection[str] = (),
        limits: Limits | None = None,
    ) -> None:
        """shared: True to let other processes listen on the same port (SO_REUSEPORT).

        check: raises an OutriderError for the metadata of a call without a valid key; None requires no key. public:
        methods that need no key, besides health checks
        """
        limits = limits or Limits()
        guard = Guard(check, public, limits)
        self.server = grpc.aio.server(interceptors=[guard], options=[*limits.options(), (_REUSE_PORT, int(shared))])
        self.health = _Health(guard)
        add_HealthServicer_to_server(self.health, self.server)
        self._names: tuple[str, ...] = ("",)

    async def start(self, address: str, service_names: Sequence[str], tls: ServerTls | None = None) -> None:
        """Bind and listen. address: "host:port" or "unix:/path". Raises ConfigError if it cannot be bound."""
        if tls is not None and address.startswith("unix:"):
            raise ConfigError(f"{address} is a Unix domain socket, which is never encrypted; leave --ssl-certfile out, "
                              "or listen on host:port")  # fmt: skip
        if (path := socket_path(address)) is not None:
            check_socket_path(path)
            refuse_used_socket(path)
        # gRPC replaces 0 by any free port, and cuts higher numbers to 16 bits.
        elif (port := address.rpartition(":")[2]).isdecimal() and not 0 < int(port) < 65536:
            raise ConfigError(f"cannot listen on {address}: {port} is no port; choose one from 1 to 65535")
        self._names = ("", *service_names)
        reflection.enable_server_reflection(
            (*service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME), self.server
        )
        await self.set_serving(False)
        try:
            if tls is None:
                bound = self.server.add_insecure_port(address)
            else:
                bound = self.server.add_secure_port(address, tls.credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: is it in use? Choose another address ({error})") from None
        if bound == 0 and not address.startswith("unix:"):
            raise ConfigError(f"cannot listen on {address}: is it in use? Choose another address")
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        """Set the status that the health service reports."""
        for name in self._names:
            await self.set_status(name, serving)

    async def set_status(self, name: str, serving: bool) -> None:
        """Set the status of one name alone."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set(name, status)

    def set_progress(self, progress: str) -> None:
        """Set the progress that health checks report, a few words. Any thread may call."""
        self.health.progress = progress

    async def stop(self, grace: float = 2.0) -> None:
        """Stop the server. grace: seconds that calls in progress have to end."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace)


def _ascii(text: str) -> str:
    """A text as a value of metadata, which takes printable ASCII only; cut to 500 characters."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:500])


def stop_on_signals() -> asyncio.Event:
    """Returns an event that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _build_in_thread(build: Callable[[], Engine], stop: asyncio.Event) -> Engine:
    """Build the engine in a thread of its own. Raises LoadingAborted if `stop` is set before the engine is built."""
    future: Future[Engine] = Future()
    future.set_running_or_notify_cancel()  # from here on only the wait can be cancelled, not the thread

    def run() -> None:
        try:
            future.set_result(build())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="builder", daemon=True).start()
    engine, stopping = asyncio.wrap_future(future), asyncio.create_task(stop.wait())
    try:
        waits: set[asyncio.Future[Any]] = {engine, stopping}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not engine.done():
            log.info("stopping before the model is loaded")
            raise LoadingAborted
        return engine.result()
    finally:
        stopping.cancel()
        engine.cancel()


async def sessions_gone(hub: StreamHub[Any, Any], stop: asyncio.Event, seconds: float) -> None:
    """Wait until no session is left: gateways, which watch the health, move them to other replicas.

    Ends after `seconds`, and when `stop` is set again, by a signal or a fault.
    """
    stop.clear()
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    if not hub.sessions or seconds <= 0:
        return
    log.info("%d sessions have %g s to move to other replicas, or to end", hub.sessions, seconds)
    gone = False
    while not gone and not stop.is_set() and clock() < end:
        gone = not hub.sessions  # one more turn, in which their last frames are written
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _DRAIN_POLL)


async def serve_engine(
    build: Callable[[], Engine],
    address: str,
    decode: Decode[Any],
    encode: Encode[Any],
    register: Callable[[GrpcServer, StreamHub[Any, Any], EngineLoop], Sequence[str]],
    network_cores: Sequence[int] | None = None,
    *,
    tls: ServerTls | None = None,
    token: str | None = None,
    drain: float = 0.0,
    watch: Callable[[EngineLoop, GrpcServer], Coroutine[Any, Any, None]] | None = None,
) -> int:
    """Serve an engine until a signal or a fault. Returns the process's exit code.

    Raises LoadingAborted if a signal arrives before the engine is built: the building thread cannot be interrupted.

    build: returns the engine, warmed up; called in a thread of its own once the port is bound. register: adds the
    service to the server and returns the full names of what it added. network_cores: CPU cores of the network threads;
    the engine stays on the present cores of the process. token: that callers must have. drain: seconds that sessions
    have to move or to end after a signal; a second one ends them. watch: runs beside the engine
    """
    own = sorted(os.sched_getaffinity(0))
    run_network_on(network_cores)
    stop = stop_on_signals()
    network = asyncio.get_running_loop()

    def end(_: BaseException) -> None:
        network.call_soon_threadsafe(stop.set)

    def build_there() -> Engine:
        run_compute_on(own)
        return build()

    loop = EngineLoop(on_fault=end, cores=own)
    hub: StreamHub[Any, Any] = StreamHub(loop, decode, encode)
    server = GrpcServer(check=token_check(token))
    await server.start(address, register(server, hub, loop), tls)
    try:
        await hub.acceptor.open(address)
        engine = await _build_in_thread(build_there, stop)
    except BaseException:
        await hub.acceptor.close()
        await server.stop(grace=0.0)
        raise
    with frozen_heap():
        loop.start(engine, hub.publish)
        server.set_progress("")
        await server.set_serving(True)
        log.info("ready on %s%s", address, " (TLS)" if tls is not None else "")
        STARTUP.done("serving")
        log.info("%s", STARTUP.describe())
        watching = asyncio.create_task(watch(loop, server)) if watch is not None else None
        await stop.wait()
        if watching is not None:
            watching.cancel()
        log.info("stopping")
        await server.set_serving(False)
        if not loop.fault:
            await sessions_gone(hub, stop, drain)
        hub.close()
        await hub.acceptor.close()
        await server.stop()
        await asyncio.to_thread(loop.stop)
    return 1 if loop.fault else 0
