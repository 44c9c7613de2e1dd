"""The gateway process: ports first, then services, then clients.

1. bind the REST and gRPC ports, so that a port in use is an error at once; answer 503 meanwhile
2. wait for a target, and read its facts and tokenizer (`model.py`); of several models one is enough. Their file may
   be read again meanwhile
3. serve until a signal, and connect to the other services. With one model, a target that a flag names by its address
   and that does not fit ends the process; a draft that does not fit or does not come is tried again, unless
   --require-draft makes it an error. So is a replica that DNS, a file or the API names, and with several models any
   other: it is only unused
4. refuse new requests, and drain the running ones
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway.admission.access import Access
from gateway.admission.admission import Admission, Keys
from gateway.api import app as rest
from gateway.api.middleware import EdgeMiddleware, KeyCheck
from gateway.api.tracing import Traced
from gateway.control.models import Models
from gateway.facade import Backend, Facade, facades
from gateway.grpc.service import SERVICE_NAME, GatewayServicer
from gateway.process.first_model import first_model
from gateway.process.listeners import Listeners
from gateway.process.model import ModelRunner
from gateway.process.models_file import model_configs
from gateway.process.models_reload import ModelsReload
from gateway.telemetry import request_log
from gateway.workers.parent import supervise_workers
from gateway.workers.peers import Peers
from outrider.config import GatewayConfig, parse_flags
from outrider.errors import ConfigError
from outrider.placement.shares import share_of_gateway
from outrider.process import process
from outrider.process.cpu_affinity import run_network_on
from outrider.process.ports import host_and_port
from outrider.process.startup import STARTUP
from outrider.tracing import Tracing, tracing_to
from outrider.transport.rpc import stop_on_signals
from outrider.wire.v1 import gateway_pb2_grpc

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def main(argv: Sequence[str]) -> int:
    """Run the gateway with flags. Returns the process's exit code; 2 for flags, ports or services that do not fit."""
    config = parse_flags(GatewayConfig, argv, "outrider gateway")
    if config.models is not None:  # until the file is read, a change of it needs no signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if config.gateway_workers != 1:
        run = process.run_plainly
        return run("gateway", config, lambda whole: asyncio.run(_supervise(whole)), share_of_gateway)
    return process.run("gateway", config, serve, share_of_gateway)


async def _supervise(config: GatewayConfig) -> int:
    model_configs(config)  # a mistake in the file is an error here, before any worker reads it
    return await supervise_workers(config, (lambda: _can_be_read(config)) if config.models is not None else None)


def _can_be_read(config: GatewayConfig) -> bool:
    """True if the file of --models has no mistake, which is logged otherwise."""
    try:
        model_configs(config)
    except ConfigError as error:
        log.error("%s; the models stay as they were", error.message)
        return False
    return True


async def serve(config: GatewayConfig, peers: Peers | None = None) -> int:
    """Serve until a signal. peers: other processes on the same ports. Returns the exit code.

    Raises ConfigError, Unavailable.
    """
    config.check()
    run_network_on()
    request_log.enable(config.enable_log_requests)
    with tracing_to(config.otlp_traces_endpoint, "gateway") as tracing:
        return await _serve(config, tracing, peers or Peers())


async def _serve(config: GatewayConfig, tracing: Tracing | None, peers: Peers) -> int:
    stop = asyncio.create_task(_stop_or_leave().wait())
    edge = EdgeMiddleware(config.max_body_bytes, Access(config), config.client_timeout)
    servicer, keys = GatewayServicer(), Keys(config)
    facade_services, changed = facades(config.grpc_facades), asyncio.Event()
    admission = Admission(config.max_pending_requests)
    hangup = _hangups(peers) if config.models is not None else asyncio.Event()
    configs = model_configs(config)
    run = partial(ModelRunner, peers=peers, admission=admission, report=changed.set)
    runners = [run(one, alone=len(configs) == 1) for one in configs]
    models = Models([runner.served for runner in runners], peers, any_model=config.accept_any_model)
    serve_facades = partial(_serve_facades, facade_services, models, keys, tracing)
    reload = ModelsReload(config, models, runners, partial(run, alone=False), serve_facades)
    app = _with_cors(edge, config.allowed_origins)
    listeners = Listeners(config, app, keys, models.count_unread, shared=peers.several)
    tls = config.server_tls()
    edge.app = rest.Starting(edge.app, models, keys)
    grpc_names = _add_services(listeners, servicer, facade_services)
    late = peers.opened  # other workers serve, so this one listens only when it can serve as well
    starts: list[asyncio.Task[None]] = []
    try:
        await listeners.start_health()
        for runner in runners:
            await runner.open()
        if not late:
            await listeners.open(grpc_names, tls)
        for runner in runners:
            runner.start()
        STARTUP.done("Python and libraries")
        for runner in runners:
            starts.append(asyncio.create_task(runner.begin(), name="start of a model"))
            reload.started(runner, starts[-1])
        reload.begin(hangup)
        if await unless(stop, first_model(reload, config.connect_timeout)) is None:
            return 0
        await peers.serve(models.answers)
        edge.app = KeyCheck(rest.build(models, keys), keys)
        if tracing is not None:
            edge.app = Traced(edge.app, tracing)
        servicer.serve(models, config, keys, tracing)
        serve_facades()
        if late:
            await listeners.open(grpc_names, tls)
        await listeners.set_serving(True)
        scheme = "https" if tls is not None else "http"
        rest_address, grpc_address = (host_and_port(config.host, port) for port in (config.port, config.grpc_port))
        log.info("REST on %s://%s, gRPC on %s", scheme, rest_address, grpc_address)
        STARTUP.done("tokenizer and routes")
        log.info("%s", STARTUP.describe())
        following = [_follow(start, runner, serve_facades) for start, runner in zip(starts, runners, strict=True)]
        await unless(stop, _gather(*following, _report_health(models, listeners, changed)))
        if admission.running:
            log.info("%d requests get %g s to end", admission.running, config.drain_timeout)
        await listeners.set_serving(False)
        await admission.drain(config.drain_timeout)
        return 0
    finally:
        for task in (stop, *starts):
            task.cancel()
        await reload.stop()
        await peers.stop()
        await listeners.close()


async def _follow(start: asyncio.Task[None], runner: ModelRunner, serve_facades: Callable[[], None]) -> None:
    await asyncio.wait({start})
    if not start.cancelled():  # as the start of a model is that left before its first target came
        start.result()
        serve_facades()
        await runner.follow()


def _add_services(listeners: Listeners, servicer: GatewayServicer, services: Sequence[Facade]) -> Sequence[str]:
    """Add the gRPC services to their server. Returns their names."""
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, listeners.grpc.server)
    for facade in services:
        facade.add_to(listeners.grpc.server)
    return SERVICE_NAME, *(facade.name for facade in services)


def _serve_facades(services: Sequence[Facade], models: Models, keys: Keys, tracing: Tracing | None) -> None:
    """Let the facades serve the default model, because their messages name none; nothing before it is up."""
    model = models.default.running
    backend = Backend(model.generator, model.facts, model.control, keys, tracing) if model is not None else None
    for facade in services:
        facade.serve(backend)


async def _gather(*work: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*work)


async def _report_health(models: Models, listeners: Listeners, changed: asyncio.Event) -> None:
    """Answer gRPC health checks with the present state of the services, until cancelled."""
    changed.set()
    while True:
        await changed.wait()
        changed.clear()
        drafts = [draft for model in models for draft in model.health.orchestrator.drafts]
        ready = any(target.open_to_sessions for model in models for target in model.health.orchestrator.targets)
        await listeners.report(ready=ready, draft=any(draft.open_to_sessions for draft in drafts))


def _hangups(peers: Peers) -> asyncio.Event:
    """An event that SIGHUP sets. The file of --models is read after this, so that no change is missed."""
    hangup = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    peers.takes_hangups()
    return hangup


def _stop_or_leave() -> asyncio.Event:
    """An event that a signal sets. A further Ctrl-C ends the process at once, with all running requests.

    A second SIGTERM does not, because a process group may receive one in addition to that of its supervisor.
    """
    stop = stop_on_signals()

    def interrupted() -> None:
        if stop.is_set():
            log.warning("interrupted a second time; running requests end at once")
            process.leave()
        stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted)
    return stop


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The app with CORS for these origins. Outermost, because browsers hide answers without the headers."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "PUT", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


async def unless(stop: asyncio.Task[Any], work: Coroutine[Any, Any, Result]) -> Result | None:
    """The work's result; None if the process is stopped first."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({stop, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # drops errors after cancellation
