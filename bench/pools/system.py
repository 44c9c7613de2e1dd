"""Simulated services and real gateways as processes, and what gateways report about themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.harness.errors import BenchError
from bench.harness.processes import start
from bench.pools.quota import limited
from outrider.config.access.callers import ADMIN_KEYS_VARIABLE
from outrider.process.ports import free_ports
from outrider.supervisor.health import is_healthy

_ADMIN_KEY = secrets.token_hex(16)
_ADMIN = {"authorization": f"Bearer {_ADMIN_KEY}"}
_STARTUP_TIMEOUT = 120.0  # seconds
_POLL = 0.02  # seconds
_TICK = os.sysconf("SC_CLK_TCK")

Lane = tuple[str, str]  # a kind of streams, and the direction


@dataclass
class Replica:
    """A simulated service. arguments: as of bench.pools.engines, behind the address. output: what it prints."""

    role: str
    address: str
    arguments: Sequence[str]
    output: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process."""
        command = [sys.executable, "-m", "bench.pools.engines", self.role, self.address, *self.arguments]
        with self.output.open("ab") as file:
            self.process = start(command, stdout=file)

    def kill(self) -> None:
        """End the process at once."""
        assert self.process is not None, "it was started"
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the process, with its answers to open calls."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)

    def firsts(self, since: float) -> list[tuple[float, int]]:
        """Time and prompt of first outputs after idle times, from a time on."""
        words = [line.split() for line in self.output.read_text().splitlines()]
        return [(float(when), int(prompt)) for when, prompt in words if float(when) >= since]

    async def wait_serving(self) -> None:
        """Raises BenchError if it does not serve in time."""
        end = time.monotonic() + _STARTUP_TIMEOUT
        while not await is_healthy(self.address, 1.0):
            if time.monotonic() > end or (self.process is not None and self.process.poll() is not None):
                raise BenchError(f"the simulated {self.role} at {self.address} does not serve")
            await asyncio.sleep(_POLL)


@contextlib.contextmanager
def replicas(folder: Path, steps: Sequence[tuple[str, float]], accept_length: int, row_bytes: int = 0) -> Iterator[
    list[Replica]
]:  # fmt: skip
    """Simulated services, which all serve. steps: role and milliseconds of a step of each."""
    made = []
    for (role, milliseconds), port in zip(steps, free_ports("127.0.0.1", len(steps)), strict=True):
        arguments = [f"{milliseconds:g}", str(accept_length), str(row_bytes)]
        made.append(Replica(role, f"127.0.0.1:{port}", arguments, folder / f"{role}-{port}"))
    try:
        for replica in made:
            replica.start()

        async def wait() -> None:
            await asyncio.gather(*(replica.wait_serving() for replica in made))

        asyncio.run(wait())
        yield made
    finally:
        for replica in made:
            if replica.process is not None:
                replica.process.terminate()
        for replica in made:
            replica.stop()


@dataclass(frozen=True)
class Traffic:
    """Counts of gateways since their start. frames, size: by stream and direction. commits: steps times the sessions in
    them
    """

    frames: Mapping[Lane, float] = field(default_factory=dict)
    size: Mapping[Lane, float] = field(default_factory=dict)
    commits: float = 0.0

    def since(self, earlier: Traffic) -> Traffic:
        """The growth."""
        return self.plus(earlier.scaled(-1.0))

    def plus(self, other: Traffic) -> Traffic:
        """The sum of two gateways'."""
        return Traffic(
            _sum(self.frames, other.frames), _sum(self.size, other.size), self.commits + other.commits
        )  # fmt: skip

    def scaled(self, factor: float) -> Traffic:
        """All counts, times a factor."""
        frames, size = [{lane: factor * count for lane, count in counts.items()} for counts in (self.frames, self.size)]
        return Traffic(frames, size, factor * self.commits)

    def bytes_of(self, stream: str, direction: str) -> float:
        """Bytes in one direction of one kind of streams."""
        return self.size.get((stream, direction), 0.0)


def _sum(one: Mapping[Lane, float], other: Mapping[Lane, float]) -> dict[Lane, float]:
    return {lane: one.get(lane, 0.0) + other.get(lane, 0.0) for lane in {**one, **other}}


def traffic_of(page: str) -> Traffic:
    """The counts in a page of metrics."""
    frames: dict[Lane, float] = {}
    size: dict[Lane, float] = {}
    commits = 0.0
    for line in page.splitlines():
        name, _, rest = line.partition("{")
        if name == "outrider_verification_steps_total" or line.startswith("outrider_verification_steps_total "):
            commits += float(line.rsplit(" ", 1)[1])
        counts = {"outrider_stream_frames_total": frames, "outrider_stream_bytes_total": size}.get(name)
        if counts is not None:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            lane = labels["stream"], labels["direction"]
            counts[lane] = counts.get(lane, 0.0) + float(line.rsplit(" ", 1)[1])
    return Traffic(frames, size, commits)


class Gateway:
    """A running gateway. port: of REST."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self._process = port, process
        self._url = f"http://127.0.0.1:{port}"

    def cpu_seconds(self) -> float:
        """Processor time that the gateway has used, with its workers."""
        return sum(map(_cpu_seconds, _with_children(self._process.pid)))

    async def workers(self) -> list[dict[str, Any]]:
        """All replicas."""
        async with httpx.AsyncClient(base_url=self._url, headers=_ADMIN, timeout=10) as client:
            found: list[dict[str, Any]] = (await client.get("/workers")).raise_for_status().json()["workers"]
            return found

    async def add(self, replica: Replica) -> None:
        """Add a replica to its pool."""
        async with httpx.AsyncClient(base_url=self._url, headers=_ADMIN, timeout=10) as client:
            body = {"url": replica.address, "worker_type": replica.role}
            (await client.post("/workers", json=body)).raise_for_status()

    async def remove(self, replica: Replica) -> None:
        """Remove a replica, which drains."""
        async with httpx.AsyncClient(base_url=self._url, headers=_ADMIN, timeout=10) as client:
            (await client.delete(f"/workers/{replica.address}")).raise_for_status()

    async def state(self, replica: Replica) -> str | None:
        """State of a replica; None once it has left."""
        found = [one["state"] for one in await self.workers() if one["address"] == replica.address]
        return str(found[0]) if found else None

    async def wait_state(self, replica: Replica, state: str | None) -> None:
        """Raises BenchError if a replica does not get into a state in time."""
        end = time.monotonic() + _STARTUP_TIMEOUT
        while (found := await self.state(replica)) != state:
            if time.monotonic() > end:
                raise BenchError(f"the {replica.role} at {replica.address} is {found}, not {state}")
            await asyncio.sleep(_POLL)

    async def traffic(self) -> Traffic:
        """Frames and bytes of its streams until now."""
        async with httpx.AsyncClient(base_url=self._url, timeout=10) as client:
            page = (await client.get("/metrics")).text
        return traffic_of(page)

    def healthy(self) -> bool:
        """True if all of its services are up."""
        if self._process.poll() is not None:
            raise BenchError(f"the gateway ended with code {self._process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            return bool(httpx.get(f"{self._url}/health", timeout=5).json()["status"] == "ok")
        return False


@contextlib.contextmanager
def gateways(
    members: Sequence[Replica], count: int = 1, *, workers: int = 1, cores: float = 0.0
) -> Iterator[list[Gateway]]:
    """Gateways with the same pools.

    workers: processes of each. cores: share of a core that each has; 0 for no limit
    """
    flags = ["--log-level", "error", "--disable-draft-self-test", "--gateway-workers", str(workers)]
    for role in ("target", "draft"):
        addresses = [replica.address for replica in members if replica.role == role]
        flags += [f"--{role}", *addresses] if addresses else []
    ports = free_ports("127.0.0.1", 2 * count)
    with contextlib.ExitStack() as stack:
        made = []
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for port, grpc_port in zip(ports[::2], ports[1::2], strict=True):
            own = ["--port", str(port), "--grpc-port", str(grpc_port)]
            environment = {**os.environ, ADMIN_KEYS_VARIABLE: _ADMIN_KEY}
            processes.append(start([sys.executable, "-m", "gateway", *flags, *own], env=environment))
            made.append(Gateway(port, processes[-1]))
        asyncio.run(_wait_whole(made, members))
        # The limit holds from here on, so that starting does not take longer.
        for process in processes:
            limit = stack.enter_context(limited(cores))
            for pid in _with_children(process.pid):
                limit(pid)
        stack.callback(_end, processes)
        yield made


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(60)


async def _wait_whole(made: Sequence[Gateway], members: Sequence[Replica]) -> None:
    """Raises BenchError if a gateway has not all of its replicas in time."""
    end = time.monotonic() + _STARTUP_TIMEOUT
    for gateway in made:
        while not gateway.healthy() or any(one["state"] != "ready" for one in await gateway.workers()):
            if time.monotonic() > end:
                raise BenchError(f"the gateway has not all of its {len(members)} replicas: {await gateway.workers()}")
            await asyncio.sleep(_POLL)


def _with_children(pid: int) -> list[int]:
    """A process and those that it started."""
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in file.read_text().split():
                found += _with_children(int(child))
    return found


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICK
    return 0.0
