"""The parent of several gateway processes that share its ports.

    reserve the ports, so that nobody else takes them
    start the workers ──► one that dies is started again; one that cannot start at all ends all
    a signal ──► all workers at once refuse what is new, and let what is under way end

The kernel spreads connections over the workers that listen (SO_REUSEPORT). The parent itself serves no client; where
--health-listen is given it answers there, for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.workers.peers import health_address, open_mark
from outrider.config import GatewayConfig, to_argv
from outrider.errors import ConfigError, EngineFault
from outrider.process.ports import socket_folder, take_port
from outrider.process.python_command import python_command
from outrider.supervisor.health import is_healthy
from outrider.supervisor.processes import EXIT_MISCONFIGURED, POLL_SECONDS, Child, stop_and_kill_events, supervise
from outrider.telemetry import write_line
from outrider.transport.rpc import GrpcServer

log = logging.getLogger(__name__)

_GLANCE = 1.0  # seconds between two looks at whether workers that serve still do
_START_UP = 60.0  # seconds in which services that do not fit end all; later, only the worker that finds them


async def oversee(config: GatewayConfig) -> int:
    """Run --gateway-workers processes until a signal. Returns the exit code. Raises ConfigError, EngineFault."""
    config.check()
    stop, hurry = stop_and_kill_events()
    health = GrpcServer() if config.health_listen is not None else None
    with _reserved(config), socket_folder("outrider-gateway-") as folder:
        children = _children(config, folder)
        if health is not None:
            await health.start(config.health_listen or "", ())
        try:
            watching = _watch(children, folder) if health is None else _watch_both(children, folder, health)
            loser = await supervise(children, watching, stop, hurry, together=True)
        finally:
            if health is not None:
                await health.stop()
    if loser is None:
        return 0
    if loser.gave_up == EXIT_MISCONFIGURED:
        raise ConfigError(loser.reason)
    raise EngineFault(f"{loser.name}: {loser.reason}")


def worker_config(config: GatewayConfig, index: int, folder: Path) -> GatewayConfig:
    """What one worker is told: its share of the bound, a health of its own, and one of them to test the drafts."""
    return replace(
        config,
        gateway_workers=1,
        niceness=0,  # it has the parent's
        max_pending_requests=-(-config.max_pending_requests // config.gateway_workers),
        disable_draft_self_test=config.disable_draft_self_test or index > 0,
        health_listen=health_address(folder, index),
    )


def _children(config: GatewayConfig, folder: Path) -> list[Child]:
    children = []
    for index in range(config.gateway_workers):
        command = python_command("-um", "gateway.workers", str(index), str(config.gateway_workers), str(folder))
        command += to_argv(worker_config(config, index, folder))
        child = Child(f"worker {index}", command, health_address(folder, index), write_line)
        child.extra_grace = config.drain_timeout
        children.append(child)
    return children


async def _watch_both(children: Sequence[Child], folder: Path, health: GrpcServer) -> None:
    await asyncio.gather(_watch(children, folder), _answer_health(children, health))


async def _answer_health(children: Sequence[Child], health: GrpcServer) -> None:
    """Say SERVING while some worker does, for as long as they are to."""
    try:
        while True:
            asked = [is_healthy(child.address) for child in children if child.pid is not None]
            serving = any(await asyncio.gather(*asked))
            await health.set_serving(serving)
            await asyncio.sleep(_GLANCE if serving else POLL_SECONDS)
    finally:
        await health.set_serving(False)


async def _watch(children: Sequence[Child], folder: Path) -> None:
    """Say when the first worker serves, and when all do; some time later, what still dies is only started again."""
    loop, waiting = asyncio.get_running_loop(), list(children)
    until: float | None = None
    while waiting or loop.time() < (until or 0.0):
        for child in list(waiting):
            if child.pid is not None and await is_healthy(child.address):
                waiting.remove(child)
                open_mark(folder).touch()
                if not waiting:
                    log.info("%d workers serve", len(children))
                    until = loop.time() + _START_UP
        await asyncio.sleep(POLL_SECONDS)
    for child in children:
        child.ready = True


@contextlib.contextmanager
def _reserved(config: GatewayConfig) -> Iterator[None]:
    """Hold the ports that the workers will share, without listening. Raises ConfigError for one that is in use."""
    with contextlib.ExitStack() as held:
        for port, flag in ((config.port, "--port"), (config.grpc_port, "--grpc-port")):
            take_port(config.host, port, flag).close()  # also refused where others share it
            held.enter_context(take_port(config.host, port, flag, shared=True))
        yield
