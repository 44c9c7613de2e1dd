"""Overhead of the gateway per step, with simulated engines of known step time and real services, streams and clients.

A step is target -> gateway -> draft -> gateway -> target, and the target waits for every proposal. So the whole latency
between the engines counts, part of which a real target overlaps with steps. Four configurations alternate between the
same two services: a bare relay of frames over gRPC, the same relay over sockets beside the calls, the gateway with gRPC
clients, and the gateway with SSE clients. The overhead of the gateway is its time beyond the relay's over gRPC.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from bench.harness.processes import free_port, start
from bench.harness.report import Report, new_figure
from bench.streams.clients import over_grpc, over_sse
from bench.streams.pingpong import round_trips
from bench.streams.profiling import profiled, profiler
from bench.streams.relay import relayed

ROLES = ("gateway", "target", "draft")
COLUMNS = (
    "sessions", "engines_ms", "floor_ms", "relay_socket_ms", "relay_ms", "grpc_ms", "sse_ms", "grpc_overhead",
    "sse_overhead", "gateway_cpu_us_grpc", "gateway_cpu_us_sse", "target_cpu_us", "draft_cpu_us",
)  # fmt: skip
_TICK = os.sysconf("SC_CLK_TCK")
_TITLES = {"grpc": "gRPC", "sse": "SSE"}
_TARGET_SHARE = 0.8  # the target's share of the engines' time; the draft service has the rest
_STARTUP_POLLS, _STARTUP_INTERVAL = 240, 0.25  # of /health; seconds


@dataclass(frozen=True)
class System:
    """Simulated services and a real gateway. pids, addresses: by role; port: of REST."""

    pids: dict[str, int]
    addresses: dict[str, str]
    port: int
    grpc_port: int


@contextlib.contextmanager
def services(folder: str, *options: str, engines_ms: float = 0.0) -> Iterator[dict[str, str]]:
    """Simulated services as processes. Yields their addresses by role. options: of bench.streams.fakes"""
    with _started(folder, engines_ms, options) as (addresses, _):
        yield addresses


@contextlib.contextmanager
def _started(
    folder: str, engines_ms: float, options: Sequence[str] = ()
) -> Iterator[tuple[dict[str, str], dict[str, subprocess.Popen[bytes]]]]:
    port = free_port()
    addresses = {role: f"unix:{folder}/{role}-{port}" for role in ("target", "draft")}
    step_ms = {"target": _TARGET_SHARE * engines_ms, "draft": (1 - _TARGET_SHARE) * engines_ms}
    command = [sys.executable, "-m", "bench.streams.fakes"]
    processes = {role: start([*command, role, addresses[role], str(step_ms[role]), *options]) for role in addresses}
    try:
        yield addresses, processes
    finally:
        for process in processes.values():
            process.terminate()
            process.wait(20)


@contextlib.contextmanager
def system(folder: str, engines_ms: float = 0.0) -> Iterator[System]:
    """Simulated services and a gateway as processes. engines_ms: step time of target and draft together."""
    port, grpc_port = free_port(), free_port()
    with _started(folder, engines_ms) as (addresses, processes):
        flags = ["--target", addresses["target"], "--draft", addresses["draft"], "--log-level", "error"]
        gateway = start([sys.executable, "-m", "gateway", *flags, "--port", str(port), "--grpc-port", str(grpc_port)])
        try:
            for _ in range(_STARTUP_POLLS):
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).json()["status"] == "ok":
                        break
                time.sleep(_STARTUP_INTERVAL)
            pids = {role: process.pid for role, process in {**processes, "gateway": gateway}.items()}
            yield System(pids, addresses, port, grpc_port)
        finally:
            gateway.terminate()  # first: it would log the loss of the others
            gateway.wait(20)


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def listeners(running: System) -> list[tuple[str, Callable[[int, int, int], Coroutine[Any, Any, float]], int]]:
    """The listeners of the gateway: name, client function, port."""
    return [("grpc", over_grpc, running.grpc_port), ("sse", over_sse, running.port)]


def measure(running: System, sessions: int, steps: int) -> dict[str, float]:
    """Milliseconds per step of both relays, gRPC and SSE, and CPU microseconds per step of each process."""
    figures = {
        "relay_ms": 1e3 * relayed(running.addresses, sessions, steps) / steps,
        "relay_socket_ms": 1e3 * relayed(running.addresses, sessions, steps, "socket") / steps,
    }
    for listener, run_clients, port in listeners(running):
        before = {role: cpu_seconds(running.pids[role]) for role in ROLES}
        figures[f"{listener}_ms"] = 1e3 * uvloop.run(run_clients(port, sessions, 2 * steps)) / steps
        cpu = {role: 1e6 * (cpu_seconds(running.pids[role]) - before[role]) / steps for role in ROLES}
        figures[f"gateway_cpu_us_{listener}"] = cpu["gateway"]
        figures |= {f"{role}_cpu_us": cpu[role] for role in ("target", "draft")}
    return figures


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/streams.*."""
    parser = argparse.ArgumentParser(prog="outrider bench streams", description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 64], help="concurrent sessions")
    parser.add_argument("--engines-ms", type=float, nargs="+", default=[0, 10, 25, 50],
                        help="step time of both engines together, in ms")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=4, help="approximate duration of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the report has medians")
    parser.add_argument("--profile", action="store_true", help="profile the gateway with py-spy")
    args = parser.parse_args(argv)
    if args.profile:
        profiler()
    report = Report("streams", "Overhead of the gateway per step, with simulated engines", columns=COLUMNS)
    report.notes = [
        f"engines: step time of target ({_TARGET_SHARE:.0%}) and draft service, which sleep and run in lockstep",
        "floor: the engines' time and two round trips of bare frames of equal size over a socket, in the same run",
        "relay: a step, which is four hops, with a process that only forwards frames between the services, over gRPC "
        "on Unix domain sockets; relay_socket: the same with the frames over sockets beside the calls",
        "grpc, sse: a step with the gateway and one client per session; overhead: time beyond the relay's / engines",
        "cpu: CPU time per step, all threads of a process; clients run on the same cores",
        f"medians of {args.rounds} rounds, in which both relays, gRPC and SSE alternate",
    ]
    with tempfile.TemporaryDirectory() as folder:
        sizes = {n: 40 * n + 40 for n in args.sessions}
        floors = dict(zip(args.sessions, round_trips(f"{folder}/echo", list(sizes.values())), strict=True))
        for engines in args.engines_ms:
            with system(folder, engines) as running:
                uvloop.run(over_grpc(running.grpc_port, 2, 200))
                for sessions in args.sessions:
                    steps = max(50, int(1e3 * args.seconds / (engines + 1 + sessions / 16)))
                    rounds = [measure(running, sessions, steps) for _ in range(args.rounds)]
                    row = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
                    for listener in ("grpc", "sse") if engines else ():
                        row[f"{listener}_overhead"] = (row[f"{listener}_ms"] - row["relay_ms"]) / engines
                    report.add(sessions=sessions, engines_ms=engines, floor_ms=engines + 2e-3 * floors[sessions], **row)
        if args.profile:
            with system(folder, args.engines_ms[-1]) as running:
                most = max(args.sessions)
                for listener, run_clients, port in listeners(running):
                    report.more.append(
                        (
                            f"CPU profile of the gateway, {most} clients over {_TITLES[listener]}",
                            profiled(running.pids["gateway"], lambda: uvloop.run(run_clients(port, most, 800))),  # noqa: B023
                        )
                    )
    _plot(report)
    report.write()


def _plot(report: Report) -> None:
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    most = max(row["sessions"] for row in report.rows)
    rows = [row for row in report.rows if row["sessions"] == most]
    x = range(len(rows))
    for name, style in (("floor", "k--"), ("relay_socket", "kx:"), ("relay", "ko:"), ("grpc", "o-"), ("sse", "o-")):
        spent = [row[f"{name}_ms"] - row["engines_ms"] for row in rows]
        axes.plot(x, spent, style, label=name.replace("_", ", "))
    bound = [row["relay_ms"] - 0.9 * row["engines_ms"] for row in rows]
    axes.plot(x, bound, color="grey", lw=0.8, label="relay + 10 % of the engines' time")
    axes.set(xlabel="engines, ms per step", ylabel="ms per step beyond the engines", title=f"{most} sessions")
    axes.set_xticks(list(x), [f"{row['engines_ms']:g}" for row in rows])
    axes.grid(alpha=0.3)
    axes.set_ylim(0)
    figure.legend(fontsize=8, loc="outside lower center", ncol=5)
    report.save(figure)
