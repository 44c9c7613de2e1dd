"""The actor that runs one service process: `outrider target`, `draft` or `gateway`, as `outrider serve` runs it.

The actor restarts a process that ends or hangs (outrider/supervisor/processes.py), on the same address. Ray restarts
the actor when it or its node is lost; the new one has no process until the controller starts it. The process dies with
the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from outrider.clusters.ray import local_rest
from outrider.clusters.ray.cores import CoreLocks
from outrider.clusters.ray.plan import Kind
from outrider.clusters.ray.units import HostStatus, Launch
from outrider.config import DraftConfig, GatewayConfig, TargetConfig, format_cores, to_argv
from outrider.errors import ConfigError
from outrider.process.ports import host_and_port, socket_folder
from outrider.process.python_command import python_command
from outrider.service_token import VARIABLE as TOKEN_VARIABLE
from outrider.supervisor.draft_watch import DRAFT_BACKOFF
from outrider.supervisor.hangs import SILENT_SECONDS
from outrider.supervisor.processes import GRACE_SECONDS, Child
from outrider.telemetry import setup_logging, write_line

_READY_POLL_SECONDS = 0.25


class Host:
    """Runs one service process. Its methods run in the event loop of a Ray actor."""

    def __init__(self) -> None:
        setup_logging("host")
        self._node: str = ray.util.get_node_ip_address()
        self._taken: list[socket.socket] = []
        self._meeting: socket.socket | None = None  # where ranks meet; stays while processes start again
        self._cores = CoreLocks()
        self._folder = contextlib.ExitStack()  # of the gateway's sockets
        self._child: Child | None = None
        self._address, self._control = "", ""
        self._restarts = 0
        self._refused = ""  # why the process could not be started at all
        self._changing = asyncio.Lock()  # held by `start` and `stop`, whose callers may be lost and call again
        self._life: asyncio.Task[None] | None = None
        self._health: asyncio.Task[None] | None = None  # waits until the process is ready

    async def reserve(self) -> str:
        """An address of this machine where ranks may meet; no other process gets it."""
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = _hold_port(self._node)
        return host_and_port(self._node, self._meeting.getsockname()[1])

    async def start(self, launch: Launch) -> None:
        """Start the process. One that runs already is stopped first."""
        async with self._changing:
            await self._stop()
            try:
                self._start(launch)
            except (ConfigError, OSError) as error:  # a port or a core cannot be had
                self._refused = str(error)

    def _start(self, launch: Launch) -> None:
        """Raises ConfigError, OSError."""
        os.environ.update(launch.environment)  # of this actor's process, which its children inherit
        if not launch.bundle.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        config, health, silent = self._placed(launch)
        command = python_command("-um", "outrider", launch.kind.value, *to_argv(config))
        self._restarts = 0
        self._child = child = Child(
            launch.kind.value, command, health, write_line, backoff=DRAFT_BACKOFF, optional=True, on_end=self._ended,
            token=os.environ.get(TOKEN_VARIABLE), silent_seconds=silent,
        )  # fmt: skip
        if not isinstance(config, DraftConfig):
            child.extra_grace = config.drain_timeout
        self._life = asyncio.create_task(child.keep_alive(), name=launch.kind.value)
        self._watch(child)

    async def status(self) -> HostStatus:
        """The state of the process."""
        child = self._child
        if child is None:
            return HostStatus("failed" if self._refused else "idle", self._node, reason=self._refused)
        running = child.pid is not None
        state = "failed" if child.gave_up is not None else "ready" if running and child.ready else "starting"
        if running and not child.address:  # ranks of another machine's target
            state = "ready"
        reason = "" if state == "ready" else child.progress if running else child.reason
        return HostStatus(state, self._node, self._address, reason, self._restarts)

    async def ask(self, method: str, route: str, body: Any = None) -> tuple[int, str]:
        """Status and body of the gateway's answer on its control socket. Raises OSError if it does not answer."""
        if not self._control:
            raise OSError("no gateway runs here")
        return await asyncio.to_thread(local_rest.ask, self._control, method, route, body)

    async def stop(self) -> None:
        """Stop the process, in order if it can within its time, and give back what it occupied."""
        async with self._changing:
            await self._stop()

    async def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None and self._life is not None:
            child.end()
            await asyncio.wait([self._life], timeout=GRACE_SECONDS + child.extra_grace)
            child.end(signal.SIGKILL)
            await self._life
        if self._health is not None:
            self._health.cancel()
            self._health = None  # it has not ended yet, and the next process needs its own
        for taken in self._taken:
            taken.close()
        self._taken.clear()
        self._cores.release()
        self._folder.close()
        self._address = self._control = self._refused = ""

    def _ended(self, _: int, __: float) -> None:
        self._restarts += 1
        if self._child is not None:
            self._watch(self._child)

    def _watch(self, child: Child) -> None:
        """Wait until the process that starts now is ready."""
        child.ready = False
        if child.address and (self._health is None or self._health.done()):
            self._health = asyncio.create_task(child.wait_ready(_READY_POLL_SECONDS), name="health")

    def _placed(self, launch: Launch) -> tuple[TargetConfig | DraftConfig | GatewayConfig, str, float | None]:
        """The flags with addresses and cores of this machine, the address for health checks, and the time without an
        answer after which the process hangs.
        """
        config = launch.config
        if launch.bundle.on_cpu and launch.kind is not Kind.GATEWAY:
            config = replace(config, cores=format_cores(self._cores.take(launch.bundle.cpus)) or None)
        if isinstance(config, GatewayConfig):
            return self._placed_gateway(config)
        if isinstance(config, TargetConfig) and config.node_rank > 0:
            return config, "", None
        self._address = host_and_port(self._node, self._free_port(self._node))
        return replace(config, listen=self._address), self._address, SILENT_SECONDS

    def _placed_gateway(self, config: GatewayConfig) -> tuple[GatewayConfig, str, float | None]:
        folder = Path(self._folder.enter_context(socket_folder("outrider-ray-")))
        self._control, health = f"{folder}/control.sock", f"unix:{folder}/health.sock"
        config = replace(
            config, port=config.port or self._free_port(config.host), control_socket=self._control,
            grpc_port=config.grpc_port or self._free_port(config.host), health_listen=health,
        )  # fmt: skip
        shown = self._node if config.host in ("0.0.0.0", "::") else config.host
        scheme = "https" if config.ssl_certfile else "http"
        self._address = f"{scheme}://{host_and_port(shown, config.port)}"
        return config, health, SILENT_SECONDS

    def _free_port(self, host: str) -> int:
        """A port that stays free for the process until it is stopped."""
        self._taken.append(_hold_port(host))
        return int(self._taken[-1].getsockname()[1])


def _hold_port(host: str) -> socket.socket:
    """A socket on a free port. It does not listen: no other process gets the port, except one that asks for it by
    number and binds with SO_REUSEADDR, as the services do.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held
