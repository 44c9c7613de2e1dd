"""The gateway process: ports first, then services, then clients.

1. bind the REST and gRPC ports, so that a port in use is an error at once; answer 503 meanwhile
2. wait for a target, and read its facts and tokenizer
3. serve until a signal, and connect to the other services. A target that a flag names by its address and that does not
   fit ends the process; a draft that does not fit or does not come is tried again, unless --require-draft makes it an
   error. So is a replica that DNS, a file or the API names: it is only unused
4. refuse new requests, and drain the running ones
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway.admission.access import Access
from gateway.admission.admission import Admission, Keys
from gateway.api import app as rest
from gateway.api.middleware import EdgeMiddleware, KeyCheck
from gateway.api.tracing import Traced
from gateway.control.control import Control
from gateway.control.replicas import Replicas
from gateway.control.server_info import Facts
from gateway.control.worker_answers import answers_for
from gateway.facade import Backend, facades
from gateway.grpc.service import SERVICE_NAME, GatewayServicer
from gateway.orchestration import self_test
from gateway.orchestration.generator import Generator
from gateway.orchestration.orchestrator import Orchestrator
from gateway.orchestration.sampling_defaults import FILE, OPENAI, SamplingDefaults, of_model
from gateway.pools.addresses import parse
from gateway.pools.discovery import Discovery
from gateway.pools.members import Members
from gateway.pools.pool import Routing
from gateway.process.links import AnyLink, Links
from gateway.process.listeners import Listeners
from gateway.streams.availability import ReplicaState
from gateway.streams.connection import Connection
from gateway.streams.draft import DraftLink
from gateway.streams.pool_weights import OtherWeights
from gateway.streams.target import TargetLink
from gateway.telemetry import request_log
from gateway.telemetry.compatible_metrics import SglangMetrics, VllmMetrics
from gateway.telemetry.metrics import Metrics
from gateway.text.early import EarlyTokenizer
from gateway.workers.parent import supervise_workers
from gateway.workers.peers import Peers
from outrider.config import GatewayConfig, parse_flags
from outrider.errors import ConfigError, Unavailable
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

_WARN_AFTER = 2.0  # seconds after which an absent service is logged
_POLL_SECONDS = 0.2
_START_UP = 60.0  # seconds in which a service that does not fit ends the process; later it is only unused


def main(argv: Sequence[str]) -> int:
    """Run the gateway with flags. Returns the process's exit code; 2 for flags, ports or services that do not fit."""
    config = parse_flags(GatewayConfig, argv, "outrider gateway")
    if config.gateway_workers != 1:
        run = process.run_plainly
        return run("gateway", config, lambda whole: asyncio.run(supervise_workers(whole)), share_of_gateway)
    return process.run("gateway", config, serve, share_of_gateway)


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
    facade_services, metrics = facades(config.grpc_facades), Metrics()
    listeners = Listeners(config, _with_cors(edge, config.allowed_origins), keys, metrics, shared=peers.several)
    admission = Admission(config.max_pending_requests)
    background: list[asyncio.Task[Any]] = []
    tls = config.server_tls()
    connection = Connection(config.service_tls(), config.stream_transport, config.service_token())
    routing = Routing(config.cache_threshold, config.balance_abs_threshold, config.balance_rel_threshold)
    discovery = Discovery(Members(map(parse, config.target), map(parse, config.draft)), config.discovery_interval)
    orchestrator = Orchestrator([], [], metrics, routing=routing)
    links, replicas = Links(discovery, orchestrator, connection), Replicas(discovery, orchestrator, peers)
    edge.app = rest.Starting(edge.app, replicas, keys)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, listeners.grpc.server)
    for facade in facade_services:
        facade.add_to(listeners.grpc.server)
    grpc_names = (SERVICE_NAME, *(facade.name for facade in facade_services))
    late = peers.opened  # other workers serve, so this one listens only when it can serve as well
    try:
        await listeners.start_health()
        await peers.serve(replicas.answers)
        await replicas.catch_up()
        if not late:
            await listeners.open(grpc_names, tls)
        tokenizers = EarlyTokenizer()
        links.on_early_files = tokenizers.begin
        links.start()
        background.append(asyncio.create_task(replicas.keep_up(), name="keep up"))
        # Where replicas may be found later, the gateway waits for the first one without end.
        seconds = config.connect_timeout if links.targets_are_fixed else None
        STARTUP.done("Python and libraries")
        target = await unless(stop, first_target(orchestrator.targets, links, seconds))
        if target is None:
            return 0
        links.expect(target)
        assert target.info is not None, "a link that is up has info"
        STARTUP.done("waiting for the target")
        facts = Facts(config, target.info, peers, target.tokenizer_files)
        generator = Generator(
            orchestrator,
            await tokenizers.of(target.tokenizer_files),
            metrics,
            name=next(iter(config.served_model_name), target.info.model.model_path),
            aliases=config.served_model_name[1:],
            any_model=config.accept_any_model,
            vocab_size=target.info.model.vocab_size,
            max_session_tokens=target.info.max_session_tokens,
            admission=admission,
            timeout=config.request_timeout,
            defaults=_defaults(config, target),
        )
        if not config.disable_vllm_metrics:
            metrics.registry.register(VllmMetrics(metrics, generator.name))
        if not config.disable_sglang_metrics:
            metrics.registry.register(SglangMetrics(metrics, generator.name))
        control = Control(orchestrator, facts)
        links.serve(control)
        tester = None if config.disable_draft_self_test else self_test.Tester(generator)
        if tester is not None:
            background += [asyncio.create_task(tester.test(draft), name="self-test") for draft in orchestrator.drafts]
        links.on_late = partial(_join, tester)
        await peers.serve(answers_for(generator, control))
        edge.app = KeyCheck(rest.build(generator, facts, control, replicas, keys), keys)
        if tracing is not None:
            edge.app = Traced(edge.app, tracing)
        servicer.serve(generator, facts, keys, tracing)
        backend = Backend(generator, facts, control, keys, tracing)
        for facade in facade_services:
            facade.serve(backend)
        if late:
            await listeners.open(grpc_names, tls)
        await listeners.set_serving(True)
        scheme = "https" if tls is not None else "http"
        rest_address, grpc_address = (host_and_port(config.host, port) for port in (config.port, config.grpc_port))
        log.info("REST on %s://%s, gRPC on %s", scheme, rest_address, grpc_address)
        STARTUP.done("tokenizer and routes")
        log.info("%s", STARTUP.describe())
        await unless(stop, connect(orchestrator, target, links, listeners, config))
        if admission.running:
            log.info("%d requests get %g s to end", admission.running, config.drain_timeout)
        await listeners.set_serving(False)
        await admission.drain(config.drain_timeout)
        return 0
    finally:
        for task in (stop, *background):
            task.cancel()
        await links.stop()
        await orchestrator.stop()
        await peers.stop()
        await listeners.close()


def _defaults(config: GatewayConfig, target: TargetLink) -> SamplingDefaults:
    """Sampling parameters for requests that omit them. Raises ConfigError."""
    if config.sampling_defaults == "openai":
        return OPENAI
    defaults = of_model(target.tokenizer_files)
    if defaults != OPENAI:
        log.info("default sampling parameters from the model's %s: %s", FILE, defaults)
    return defaults


def _stop_or_leave() -> asyncio.Event:
    """An event that a signal sets. A further Ctrl-C ends the process at once, with all running requests.

    A second SIGTERM does not, because a process group may receive one in addition to that of its supervisor.
    """
    stop = stop_on_signals()

    def interrupted() -> None:
        if stop.is_set():
            log.warning("interrupted again; running requests are cut")
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


async def first_target(targets: Sequence[TargetLink], links: Links, seconds: float | None) -> TargetLink:
    """Wait for the first target. Raises ConfigError if one that a flag names does not fit, Unavailable after `seconds`.

    targets: those of the pool, which others may join meanwhile. If some targets have updated weights that restarted
    ones lack, a target with updated weights is returned, if it is up by then.
    """
    with _timeout_of(targets, seconds):
        async with asyncio.timeout(seconds):
            while (first := _first_up(targets, links)) is None:
                await _change(links)
    if not _updated(first):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WARN_AFTER):
                while not all(link.settled for link in targets):
                    await _change(links)
                    first = _first_up(targets, links) or first
    return first


@contextlib.contextmanager
def _timeout_of(targets: Sequence[TargetLink], seconds: float | None) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        reasons = "; ".join(f"the target at {link.address}: {link.availability.reason}" for link in targets)
        raise Unavailable(f"no target service answered in {seconds:.0f} s ({reasons})") from None


async def _change(links: Links) -> None:
    links.changed.clear()
    await links.changed.wait()


def _first_up(targets: Sequence[TargetLink], links: Links) -> TargetLink | None:
    """As _most_recent. Raises the ConfigError of a target that a flag names."""
    for link in targets:
        if link.refusal is not None and links.is_named(link):
            raise link.refusal
    return _most_recent(targets)


def _most_recent(targets: Sequence[TargetLink]) -> TargetLink | None:
    """The first target that is up with updated weights; else the first that is up."""
    up = [link for link in targets if link.up and link.info is not None]
    return next((link for link in up if _updated(link)), next(iter(up), None))


def _updated(link: TargetLink) -> bool:
    """True if a target's weights were updated since its start."""
    info = link.info
    return info is not None and info.first_fingerprint not in ("", info.model.fingerprint)


async def connect(
    orchestrator: Orchestrator, first: TargetLink, links: Links, listeners: Listeners, config: GatewayConfig
) -> None:
    """Connect to the other services, and report changes to health checks, forever.

    Raises ConfigError for a target that a flag names and that does not fit; with --require-draft also for a draft, and
    Unavailable for one that does not come.
    """
    links.changed.set()
    links.start_drafts()
    required = config.connect_timeout if config.require_draft else None
    work = [_connect_target(link) for link in orchestrator.targets if link is not first and links.is_named(link)]
    work += [_connect_draft(link, required if links.is_named(link) else None) for link in orchestrator.drafts]
    if required is not None and config.draft and not any(map(links.is_named, orchestrator.drafts)):
        work.append(_any_draft(orchestrator, required))
    await asyncio.gather(_report_health(orchestrator, listeners, links.changed), *work)


async def _report_health(orchestrator: Orchestrator, listeners: Listeners, changed: asyncio.Event) -> None:
    """Answer gRPC health checks with the present state of the services, until cancelled."""
    while True:
        await changed.wait()
        changed.clear()
        pools: tuple[Sequence[AnyLink], ...] = (orchestrator.targets, orchestrator.drafts)
        ready, draft = (any(link.open_to_sessions for link in pool) for pool in pools)
        await listeners.report(ready=ready, draft=draft)


async def _connect_target(link: TargetLink) -> None:
    with contextlib.suppress(OtherWeights):  # logged by the link; the next update resolves it
        try:
            await link.wait_up(_WARN_AFTER)
        except Unavailable as error:
            log.warning("%s; continuing without it until it is up", error.message)
            with contextlib.suppress(Unavailable):
                await link.wait_up(_START_UP)


async def _any_draft(orchestrator: Orchestrator, seconds: float) -> None:
    """Wait until one of the drafts is up that DNS or files name. Raises Unavailable after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not any(draft.up for draft in orchestrator.drafts):
        if asyncio.get_running_loop().time() > deadline:
            raise Unavailable(f"no draft service answered in {seconds:.0f} s (--require-draft)")
        await asyncio.sleep(_POLL_SECONDS)


async def _join(tester: self_test.Tester | None, link: AnyLink) -> None:
    """Watch a replica that joins while the gateway serves; test a draft. It is never an error."""
    if isinstance(link, DraftLink):
        await _connect_draft(link, None)
        if tester is not None:
            await tester.test(link)
        return
    with contextlib.suppress(ConfigError):  # logged by the link
        await _connect_target(link)


async def _connect_draft(link: DraftLink, required: float | None) -> None:
    """Wait for a draft. required: seconds within which it must come, or the process ends; None without it."""
    if required is not None:
        await link.wait_up(required)
        return
    # Loading and compiling a draft's model takes up to a minute, so that an absent one is no warning before.
    for seconds, silent in ((_WARN_AFTER, logging.INFO), (_START_UP - _WARN_AFTER, logging.WARNING)):
        try:
            await link.wait_up(seconds)
            return
        except (Unavailable, ConfigError):  # the link goes on trying
            state, reason = link.availability.state, link.availability.reason
        what = f"the {link.service} at {link.address}"
        if state not in (ReplicaState.UNREACHABLE, ReplicaState.STARTING):  # the link has logged the reason
            log.warning("%s is not used; text is decoded plainly until it is", what)
            return
        level = logging.INFO if state is ReplicaState.STARTING else silent
        log.log(level, "%s is not up yet (%s); text is decoded plainly until it is", what, reason)
