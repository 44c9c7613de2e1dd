"""The process: ports first, then the services, then clients.

1. bind the REST and gRPC ports, so that a port in use is said at once
2. wait for a target and learn its facts and tokenizer; meet the drafts, and refuse those that don't fit
3. serve until a signal
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tyro
import uvicorn
import uvloop

from gateway.api import app as rest
from gateway.api.middleware import Edge
from gateway.facts import Facts
from gateway.generation import Generator
from gateway.metrics import Metrics
from gateway.orchestrator import Orchestrator
from gateway.service import SERVICE_NAME, GatewayServicer
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.text.tokenizer import ModelTokenizer
from outrider.config import GatewayConfig, parse_cores
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.serving.rpc import GrpcServer, stop_on_signals
from outrider.telemetry import setup_logging
from outrider.wire.v1 import gateway_pb2_grpc

log = logging.getLogger(__name__)

_DRAFT_WAIT = 5.0  # seconds that start-up waits for a draft; later ones join when they come


def main(argv: Sequence[str]) -> int:
    """Run the gateway with flags. Returns the process's exit code; 2 for flags, ports or services that do not fit."""
    config = tyro.cli(GatewayConfig, args=argv, prog="outrider gateway")
    setup_logging("gateway", config.log_level)
    try:
        if config.cores is not None:
            os.sched_setaffinity(0, parse_cores(config.cores))
        return uvloop.run(serve(config))
    except (ConfigError, Unavailable) as error:
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


async def serve(config: GatewayConfig) -> int:
    """Serve until a signal. Returns the exit code. Raises ConfigError, Unavailable."""
    stop = stop_on_signals()
    listener = bind(config.host, config.port)
    grpc_server = GrpcServer()
    metrics = Metrics()
    targets = [TargetLink(address) for address in config.target]
    orchestrator = Orchestrator(targets, [], metrics)
    try:
        facts = await _first_target(targets, config, stop)
        if facts is None:
            return 0
        await _meet_drafts(orchestrator, config, facts)
        tokenizer = ModelTokenizer(next(link.tokenizer_files for link in targets if link.tokenizer_files))
        generator = Generator(
            orchestrator,
            tokenizer,
            metrics,
            name=config.served_model_name or facts.target.model.model_path,
            vocab_size=facts.target.model.vocab_size,
            max_session_tokens=facts.target.max_session_tokens,
        )
        servicer = GatewayServicer(generator, facts)
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, grpc_server.server)
        await grpc_server.start(f"{config.host}:{config.grpc_port}", (SERVICE_NAME,))
        await grpc_server.set_serving(True)
        await _serve_rest(generator, facts, config, listener, stop)
        return 0
    finally:
        listener.close()
        await orchestrator.stop()
        await grpc_server.stop()


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the port is in use."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        reason = f"cannot listen on {host}:{port}: {error.strerror}"
        raise ConfigError(f"{reason}; is it in use? Choose another --port") from None


async def _first_target(targets: Sequence[TargetLink], config: GatewayConfig, stop: asyncio.Event) -> Facts | None:
    """Connect to all targets and wait for the first. None if a signal came first. Raises ConfigError, Unavailable."""
    for link in targets:
        link.start()
    waits = [asyncio.create_task(link.wait_up(config.connect_timeout)) for link in targets]
    stopped = asyncio.create_task(stop.wait())
    try:
        pending: set[asyncio.Task[Any]] = {*waits, stopped}
        errors: list[OutriderError] = []
        while len(errors) < len(waits):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if stopped in done:
                return None
            for task in done:
                error = task.exception()
                if error is None:
                    info = next(link.info for link in targets if link.up and link.info is not None)
                    return Facts(config, info)
                if not isinstance(error, OutriderError):
                    raise error
                errors.append(error)
        raise errors[0]
    finally:
        for task in (*waits, stopped):
            task.cancel()


async def _meet_drafts(orchestrator: Orchestrator, config: GatewayConfig, facts: Facts) -> None:
    """Connect to the drafts. One that is away joins later; one that does not fit raises ConfigError."""
    for address in config.draft:
        link = DraftLink(address, facts.target.model)
        orchestrator.drafts.append(link)
        orchestrator.attach_draft(link)
        link.start()
    for link in orchestrator.drafts:
        try:
            await link.wait_up(_DRAFT_WAIT)
        except Unavailable as error:
            log.warning("%s; text is decoded plainly until it comes", error.message)


async def _serve_rest(
    generator: Generator, facts: Facts, config: GatewayConfig, listener: socket.socket, stop: asyncio.Event
) -> None:
    app = Edge(rest.build(generator, facts), config.max_body_bytes)
    settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    server = _Server(settings)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    log.info("REST on http://%s:%d, gRPC on %s:%d", config.host, config.port, config.host, config.grpc_port)
    await asyncio.wait({running, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    await generator.orchestrator.stop()
    server.should_exit = True
    await running
