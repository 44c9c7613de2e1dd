"""The system under test: the supervisor's children, each with a network namespace, a disk and a clock of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.harness.errors import BenchError
from outrider.config import ServeConfig, read_flags
from outrider.placement.cores import choose_cores
from outrider.process.backoff import Backoff
from outrider.service_token import make_token_file
from outrider.supervisor.app import TOKEN_FILE, configure, make_children
from outrider.supervisor.display import Display
from outrider.supervisor.processes import Child, supervise
from outrider.supervisor.resolution import resolve_config
from tests.chaos.network import Network, address
from tests.support.gateway.services import metric_of

ROLES = ("target", "draft", "gateway")
WORKERS = 2
_PORT = 30000
_DISK = "48m"  # size of each process's disk
_RESTART = Backoff(first=0.5, longest=0.5)  # the growth of waits after repeated deaths is not what is measured here
_START_SECONDS = 300.0


@dataclass(frozen=True)
class Levels:
    """What must return to its level after a fault, by role. pages: leased ones; memory: resident, in MB."""

    pages: dict[str, float]
    sessions: dict[str, float]
    files: dict[str, int]
    memory: dict[str, float]


@dataclass
class System:
    """The running system. output: lines that its processes have written."""

    network: Network
    folder: Path
    children: dict[str, Child] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)
    url: str = f"http://{address('gateway')}:{_PORT}"

    def disk(self, role: str) -> Path:
        """The folder of a process's cache and temporary files, a file system of its own."""
        return self.folder / role

    def set_clock(self, role: str, seconds: int) -> None:
        """Set a process's wall clock ahead of the machine's."""
        (self.folder / f"{role}.clock").write_bytes(struct.pack("q", seconds))

    def process(self, role: str) -> int:
        """Id of a service's process, or of the gateway's parent. Raises BenchError if it does not run."""
        pid = self.children[role].pid
        if pid is None:
            raise BenchError(f"the {role} process does not run")
        return pid

    def processes(self, role: str) -> list[int]:
        """Ids of all processes of a role that run: the gateway's workers come after their parent, in order."""
        pid = self.children[role].pid
        if pid is None:
            return []
        workers = [(_words(child), child) for child in _children_of(pid)] if role == "gateway" else []
        return [pid, *(child for words, child in sorted(workers) if "gateway.process.worker" in words)]

    async def metrics(self) -> str:
        """The page of metrics of all workers. Raises OSError or aiohttp.ClientError if no worker answers in time."""
        return await self._get("/metrics")

    async def healthy(self, killed: int | None = None) -> bool:
        """True if all processes run, and each worker is connected to both services. killed: must be gone."""
        running = [pid for role in ROLES for pid in self.processes(role)]
        if killed in running or any(child.pid is None for child in self.children.values()):
            return False
        try:
            page = await self.metrics()
        except (OSError, aiohttp.ClientError):
            return False
        up = metric_of(page, "outrider_worker_up")
        return up == WORKERS and metric_of(page, "outrider_service_up") == 2 * WORKERS

    async def wait_healthy(self, seconds: float, killed: int | None = None) -> None:
        """Raises BenchError if the system is not whole after some seconds. killed: as of `healthy`."""
        end = time.monotonic() + seconds
        while not await self.healthy(killed):
            if time.monotonic() > end:
                with contextlib.suppress(OSError, aiohttp.ClientError):
                    raise BenchError(f"not whole after {seconds:.0f} s: {await self._get('/health')}")
                raise BenchError(f"not whole after {seconds:.0f} s; the gateway does not answer")
            await asyncio.sleep(0.2)

    async def levels(self) -> Levels:
        """The present levels."""
        page = await self.metrics()

        def services(name: str) -> dict[str, float]:
            # Every worker reports each service; they are asked when all is quiet, so the largest is what is left.
            return {
                role: max(metric_of(page, name, service=role, worker=str(worker)) for worker in range(WORKERS))
                for role in ("target", "draft")
            }

        total, free = services("outrider_engine_total_pages"), services("outrider_engine_free_pages")
        running, waiting = services("outrider_engine_running_sessions"), services("outrider_queue_depth")
        sessions = {role: running[role] + waiting[role] for role in running}
        sessions["gateway"] = metric_of(page, "outrider_running_requests")
        processes = {role: self.processes(role) for role in ROLES}
        return Levels(
            pages={role: total[role] - free[role] for role in total},
            sessions=sessions,
            files={role: sum(map(_open_files, pids)) for role, pids in processes.items()},
            memory={role: sum(map(_resident, pids)) for role, pids in processes.items()},
        )

    async def victim(self, role: str) -> int:
        """Id of the process that a fault hits: a service's, or the gateway worker with the most running requests."""
        if role != "gateway":
            return self.process(role)
        page = await self.metrics()
        busy = [metric_of(page, "outrider_running_requests", worker=str(worker)) for worker in range(WORKERS)]
        return self.processes(role)[1 + busy.index(max(busy))]

    async def _get(self, path: str) -> str:
        # A connection of its own, because the worker of a kept one may be the one that was stopped.
        timeout = aiohttp.ClientTimeout(total=4)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(self.url + path) as answer:
            return await answer.text()


@contextlib.asynccontextmanager
async def running_system(
    network: Network, flags: list[str], log: Path, note: Callable[[str], None]
) -> AsyncIterator[System]:
    """A system with these flags of `outrider serve`. log: file for its output. note: called with what is under way."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, log.open("w") as file:
        system = System(network, Path(name))
        preloaded = _compile_clock(system.folder)
        _mount_disks(system)
        config = _configuration(flags)

        def keep(line: str) -> None:
            system.output.append(line)
            print(line, file=file, flush=True)

        display = Display()
        display.line = keep  # type: ignore[method-assign]
        make_token_file(system.folder / TOKEN_FILE)
        processes = configure(config, choose_cores(config), system.folder)
        for child in make_children(processes, display, processes.gateway.service_token()):
            child.command = network.inside(
                child.name, ["env", *_settings(system, child.name, preloaded), *child.command]
            )
            child.backoff = _RESTART
            system.children[child.name] = child
        stop, kill = asyncio.Event(), asyncio.Event()
        children = list(system.children.values())
        life = asyncio.create_task(supervise(children, _wait_ready(children), stop, kill))
        try:
            note("starting the system")
            await system.wait_healthy(_START_SECONDS)
            yield system
        finally:
            network.set({})
            stop.set()
            await life
            _unmount_disks(system)


def _configuration(flags: list[str]) -> ServeConfig:
    own = ["--host", address("gateway"), "--port", str(_PORT), "--gateway-workers", str(WORKERS)]
    own += ["--listen-target", f"{address('target')}:50051", "--listen-draft", f"{address('draft')}:50052"]
    own += ["--log-level", "warning", "--disable-draft-self-test"]
    config, _ = read_flags(ServeConfig, [*own, *flags], "outrider serve")
    return resolve_config(config, set())


def _settings(system: System, role: str, preloaded: Path) -> list[str]:
    disk = system.disk(role)
    return [
        f"OUTRIDER_CACHE={disk}/outrider", f"TMPDIR={disk}", f"LD_PRELOAD={preloaded}",
        f"CHAOS_CLOCK={system.folder}/{role}.clock",
    ]  # fmt: skip


def _mount_disks(system: System) -> None:
    for role in ROLES:
        system.disk(role).mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "chaos", str(system.disk(role))], check=True)
        system.set_clock(role, 0)


def _unmount_disks(system: System) -> None:
    for role in ROLES:
        subprocess.run(["umount", "--lazy", str(system.disk(role))], check=False)


def _compile_clock(folder: Path) -> Path:
    library = folder / "clock_step.so"
    source = Path(__file__).with_name("clock_step.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


async def _wait_ready(children: list[Child]) -> None:
    await asyncio.gather(*(child.wait_ready() for child in children))


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def _open_files(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _resident(pid: int) -> float:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024
    return 0.0
