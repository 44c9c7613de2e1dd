"""The system under test: each process on a host of its own, started and ended as the campaign wants it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.harness.errors import BenchError
from bench.harness.processes import start
from outrider.config.access.callers import ADMIN_KEYS_VARIABLE
from outrider.service_token import VARIABLE as TOKEN_VARIABLE
from tests.chaos.emulator import Rule
from tests.chaos.network import Network
from tests.support.gateway.services import metric_of

TARGETS, DRAFTS = ("target0", "target1"), ("draft0", "draft1")
REPLICAS = (*TARGETS, *DRAFTS)
NODES = ("client", "gateway", *REPLICAS)
_PORT, _SERVICE_PORT = 30000, 50051
_START_SECONDS = 240.0
_POLL = 0.05  # seconds
_ANSWER_SECONDS = 5.0
_ADMIN_KEY = secrets.token_hex(16)
_ADMIN = {"authorization": f"Bearer {_ADMIN_KEY}"}

Command = Sequence[str]


@dataclass(frozen=True)
class Services:
    """How a replica of each service is started, without its address.

    simulated: engines that take time only, whose address is a word of the command, behind the service
    """

    target: Command
    draft: Command
    simulated: bool = False

    def command(self, node: str, address: str) -> list[str]:
        """The command of a replica."""
        own = self.target if node in TARGETS else self.draft
        if self.simulated:
            return [sys.executable, "-m", *own[:2], address, *own[2:]]
        return [sys.executable, "-m", "outrider", *own, "--listen", address]


class PoolSystem:
    """The running processes. normal: rules of the network while nothing is cut."""

    def __init__(self, network: Network, services: Services, normal: Mapping[str, Rule], log: Path) -> None:
        self._network, self._services, self._log = network, services, log
        self.normal = normal
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        token = secrets.token_hex(16)
        self._environment = {**os.environ, TOKEN_VARIABLE: token, ADMIN_KEYS_VARIABLE: _ADMIN_KEY}
        self.url = f"http://{network.address('gateway')}:{_PORT}"

    def address(self, node: str) -> str:
        """The address of a replica."""
        return f"{self._network.address(node)}:{_SERVICE_PORT}"

    # --- processes ---

    def start(self, node: str) -> None:
        """Start a replica."""
        self._run(node, self._services.command(node, self.address(node)))

    def start_gateway(self) -> None:
        """Start the gateway, with all replicas in its pools."""
        command = [sys.executable, "-m", "gateway", "--log-level", "warning", "--disable-draft-self-test"]
        command += ["--host", self._network.address("gateway"), "--port", str(_PORT)]
        command += ["--target", *map(self.address, TARGETS), "--draft", *map(self.address, DRAFTS)]
        self._run("gateway", command)

    def _run(self, node: str, command: list[str]) -> None:
        with self._log.open("ab") as file:
            self._processes[node] = start(
                self._network.inside(node, command), stdout=file, stderr=file, env=self._environment
            )

    def kill(self, node: str) -> None:
        """End a process at once."""
        self._processes[node].kill()
        self._processes[node].wait()

    def stop(self) -> None:
        """End all processes, the gateway first."""
        order = [node for node in ("gateway", *REPLICAS) if node in self._processes]
        for group in (order[:1], order[1:]):
            for node in group:
                self._processes[node].terminate()
            for node in group:
                try:
                    self._processes[node].wait(30)
                except subprocess.TimeoutExpired:
                    self.kill(node)

    def cut(self, nodes: Sequence[str] = ()) -> None:
        """Cut hosts off from all others; all that are not named are connected."""
        self._network.set({**self.normal, **{node: Rule(cut=True) for node in nodes}})

    # --- what the gateway shows ---

    async def workers(self) -> dict[str, dict[str, Any]]:
        """The replicas of both pools, by node. Raises OSError or aiohttp.ClientError."""
        nodes = {self.address(node): node for node in REPLICAS}
        async with self._session() as session, session.get(f"{self.url}/workers") as answer:
            return {nodes[one["address"]]: one for one in (await answer.json())["workers"]}

    async def add(self, node: str) -> None:
        """Add a replica to its pool."""
        body = {"url": self.address(node), "worker_type": "target" if node in TARGETS else "draft"}
        async with self._session() as session, session.post(f"{self.url}/workers", json=body) as answer:
            answer.raise_for_status()

    async def remove(self, node: str) -> None:
        """Remove a replica, which drains."""
        url = f"{self.url}/workers/{self.address(node)}"
        async with self._session() as session, session.delete(url) as answer:
            answer.raise_for_status()

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples. Raises OSError or aiohttp.ClientError."""
        async with self._session() as session, session.get(f"{self.url}/metrics") as answer:
            return float(metric_of(await answer.text(), name, **labels))

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers=_ADMIN, timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS))

    async def wait_ready(self, nodes: Sequence[str], seconds: float = _START_SECONDS, sessions: int = 0) -> None:
        """Until replicas are in use, and each has some sessions. Raises BenchError after some seconds."""
        await self.wait_until(
            lambda found: all(
                node in found and found[node]["state"] == "ready" and found[node]["sessions"] >= sessions
                for node in nodes
            ),
            f"{', '.join(nodes)} are not in use",
            seconds,
        )

    async def wait_until(self, holds: Any, otherwise: str, seconds: float = _START_SECONDS) -> None:
        """Until a condition of `workers` holds. Raises BenchError after some seconds."""
        end, found = time.monotonic() + seconds, {}
        while True:
            for node, process in self._processes.items():
                if process.poll() not in (None, -signal.SIGKILL):
                    raise BenchError(f"the process of {node} ended with code {process.returncode}")
            with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
                found = await self.workers()
                if holds(found):
                    return
            if time.monotonic() > end:
                states = {node: (one["state"], one["reason"], one["sessions"]) for node, one in found.items()}
                raise BenchError(f"{otherwise} after {seconds:.0f} s: {states}")
            await asyncio.sleep(_POLL)

    async def leftovers(self) -> list[str]:
        """What should be gone after a load: requests, sessions, leased pages."""
        found = [
            f"{one['sessions'] + one['running_sessions'] + one['waiting_sessions']} sessions of {node} are open"
            for node, one in (await self.workers()).items()
            if one["sessions"] or one["running_sessions"] or one["waiting_sessions"]
        ]
        for node in REPLICAS:
            total, free = [
                await self.metric(f"outrider_engine_{kind}_pages", address=self.address(node))
                for kind in ("total", "free")
            ]
            if total != free:
                found.append(f"{total - free:g} pages of {node} are leased")
        requests = await self.metric("outrider_running_requests")
        return [*found, f"{requests:g} requests run"] if requests else found


@contextlib.asynccontextmanager
async def running_system(
    network: Network, services: Services, normal: Mapping[str, Rule], log: Path
) -> AsyncIterator[PoolSystem]:
    """All processes, with all replicas in use."""
    system = PoolSystem(network, services, normal, log)
    system.cut()
    try:
        for node in REPLICAS:
            system.start(node)
        system.start_gateway()
        await system.wait_ready(REPLICAS)
        yield system
    finally:
        system.stop()
