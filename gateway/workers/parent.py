"""The parent of several gateway processes that share its ports.

    reserve the ports
    start the workers ──► a worker that dies is restarted; one that cannot start ends all
    a signal ──► all workers refuse new requests, and finish the running ones
    SIGHUP with --models ──► all workers read the file again

The kernel distributes connections over the listening workers (SO_REUSEPORT). The parent serves no client; with
--health-listen it answers health checks for all workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.workers.peers import hangup_mark, health_address, open_mark
from outrider.config import GatewayConfig, to_argv
from outrider.errors import ConfigError, EngineFault
from outrider.process.ports import socket_folder, take_port
from outrider.process.python_command import python_command
from outrider.supervisor.hangs import SILENT_SECONDS
from outrider.supervisor.health import is_healthy
from outrider.supervisor.processes import EXIT_MISCONFIGURED, POLL_SECONDS, Child, stop_and_kill_events, supervise
from outrider.telemetry import write_line
from outrider.transport.rpc import GrpcServer

log = logging.getLogger(__name__)

_HEALTH_INTERVAL = 1.0  # seconds between health checks of serving workers
_START_UP = 60.0  # seconds in which a service that does not fit ends all workers; later only the worker that meets it


async def supervise_workers(config: GatewayConfig, on_hangup: Callable[[], bool] | None = None) -> int:
    """Run --gateway-workers processes until a signal. Returns the exit code. Raises ConfigError, EngineFault.

    on_hangup: called at SIGHUP, which otherwise ends all; if it returns True the workers receive the signal as well
    """
    config.check()
    stop, hurry = stop_and_kill_events()
    health = GrpcServer() if config.health_listen is not None else None
    with reserved_ports(config), socket_folder("outrider-gateway-") as folder:
        children = _children(config, folder)
        if on_hangup is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _hang_up, children, folder, on_hangup)
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
    """Flags of one worker: its share of the request limit, a health address; worker 0 has the self-test and the control
    socket, whose calls reach all workers.
    """
    return replace(
        config,
        gateway_workers=1,
        niceness=0,  # inherited from the parent
        max_pending_requests=-(-config.max_pending_requests // config.gateway_workers),
        disable_draft_self_test=config.disable_draft_self_test or index > 0,
        health_listen=health_address(folder, index),
        control_socket=config.control_socket if index == 0 else None,
    )


def _hang_up(children: Sequence[Child], folder: Path, wanted: Callable[[], bool]) -> None:
    if wanted():
        for index, child in enumerate(children):
            # A worker that starts would end by the signal, and needs none, because it reads the file later.
            if child.pid is not None and _takes_hangups(folder, index, child.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGHUP)


def _takes_hangups(folder: Path, index: int, pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return hangup_mark(folder, index).read_text() == str(pid)
    return False


def _children(config: GatewayConfig, folder: Path) -> list[Child]:
    children = []
    for index in range(config.gateway_workers):
        command = python_command("-um", "gateway.process.worker", str(index), str(config.gateway_workers), str(folder))
        command += to_argv(worker_config(config, index, folder))
        address = health_address(folder, index)
        child = Child(f"worker {index}", command, address, write_line, silent_seconds=SILENT_SECONDS)
        child.extra_grace = config.drain_timeout
        children.append(child)
    return children


async def _watch_both(children: Sequence[Child], folder: Path, health: GrpcServer) -> None:
    await asyncio.gather(_watch(children, folder), answer_health(children, health))


async def answer_health(children: Sequence[Child], health: GrpcServer) -> None:
    """Answer health checks: SERVING while any worker is, until cancelled."""
    try:
        while True:
            asked = [is_healthy(child.address) for child in children if child.pid is not None]
            serving = any(await asyncio.gather(*asked))
            await health.set_serving(serving)
            await asyncio.sleep(_HEALTH_INTERVAL if serving else POLL_SECONDS)
    finally:
        await health.set_serving(False)


async def _watch(children: Sequence[Child], folder: Path) -> None:
    """Wait until all workers serve; _START_UP later, a worker that dies is only restarted."""
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
def reserved_ports(config: GatewayConfig) -> Iterator[None]:
    """Bind the ports that the workers share, without listening. Raises ConfigError for a port in use."""
    with contextlib.ExitStack() as held:
        for port, flag in ((config.port, "--port"), (config.grpc_port, "--grpc-port")):
            take_port(config.host, port, flag).close()  # fails even if other processes share the port
            held.enter_context(take_port(config.host, port, flag, shared=True))
        yield
