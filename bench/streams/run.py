"""What the gateway adds to a step: fake engines that take a known time, real services, gateway, wire and clients.

One step is target -> gateway -> draft -> gateway -> target, and the target waits for every hint: all that lies between
the engines counts in full, where real targets go on meanwhile. Three things stand between the same two services in
turns: a bare relay of frames, which is the least that can; the gateway with clients over gRPC; and the gateway with
clients that read server-sent events. What the gateway takes longer than the relay is what it adds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from bench.harness.processes import start
from bench.harness.report import Report
from bench.serve.outrider_system import free_port
from bench.streams.clients import over_grpc, over_sse
from bench.streams.pingpong import round_trips
from bench.streams.profiling import profiled, profiler
from bench.streams.relay import relayed

ROLES = ("gateway", "target", "draft")
COLUMNS = (
    "sessions", "engines_ms", "floor_ms", "relay_ms", "grpc_ms", "sse_ms", "grpc_adds", "sse_adds",
    "gateway_cpu_us_grpc", "gateway_cpu_us_sse", "target_cpu_us", "draft_cpu_us",
)  # fmt: skip
_TICK = os.sysconf("SC_CLK_TCK")
_NAMES = {"grpc": "gRPC", "sse": "SSE"}
_SHARE = 0.8  # of the engines' time that the target takes, the draft the rest


@dataclass(frozen=True)
class System:
    """Fake services and the real gateway. pids: by role."""

    pids: dict[str, int]
    addresses: dict[str, str]
    port: int
    grpc_port: int


@contextlib.contextmanager
def system(folder: str, engines_ms: float = 0.0) -> Iterator[System]:
    """engines_ms: that target and draft take together for a step."""
    port, grpc_port = free_port(), free_port()
    addresses = {role: f"unix:{folder}/{role}-{port}" for role in ("target", "draft")}
    takes = {"target": _SHARE * engines_ms, "draft": (1 - _SHARE) * engines_ms}
    command = [sys.executable, "-m", "bench.streams.fakes"]
    processes = {role: start([*command, role, addresses[role], str(takes[role])]) for role in addresses}
    flags = ["--target", addresses["target"], "--draft", addresses["draft"], "--log-level", "error"]
    gateway = [sys.executable, "-m", "gateway", *flags, "--port", str(port), "--grpc-port", str(grpc_port)]
    processes["gateway"] = start(gateway)
    try:
        for _ in range(240):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.25)
        yield System({role: process.pid for role, process in processes.items()}, addresses, port, grpc_port)
    finally:
        for role in ROLES:  # the gateway first, which would call the others lost
            processes[role].terminate()
            processes[role].wait(20)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def doors(running: System) -> list[tuple[str, Callable[[int, int, int], Coroutine[Any, Any, float]], int]]:
    """The ways to the gateway: name, clients, port."""
    return [("grpc", over_grpc, running.grpc_port), ("sse", over_sse, running.port)]


def measure(running: System, sessions: int, steps: int) -> dict[str, float]:
    """Milliseconds a step by what stands between the engines, and processor time in microseconds a step."""
    told = {"relay_ms": 1e3 * relayed(running.addresses, sessions, steps) / steps}
    for door, ask, port in doors(running):
        before = {role: cpu_seconds(running.pids[role]) for role in ROLES}
        told[f"{door}_ms"] = 1e3 * uvloop.run(ask(port, sessions, 2 * steps)) / steps
        cpu = {role: 1e6 * (cpu_seconds(running.pids[role]) - before[role]) / steps for role in ROLES}
        told[f"gateway_cpu_us_{door}"] = cpu["gateway"]
        told |= {f"{role}_cpu_us": cpu[role] for role in ("target", "draft")}
    return told


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/streams.*."""
    parser = argparse.ArgumentParser(prog="outrider bench streams", description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--engines-ms", type=float, nargs="+", default=[0, 10, 25, 50], help="of both, for a step")
    parser.add_argument("--seconds", type=float, default=4, help="about so long for each figure")
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are told")
    parser.add_argument("--profile", action="store_true", help="of the gateway, by py-spy, which must be installed")
    args = parser.parse_args(argv)
    if args.profile:
        profiler()
    report = Report("streams", "What the gateway adds to a step, with engines that only take time", columns=COLUMNS)
    report.notes = [
        f"engines: that the engines of target ({_SHARE:.0%}) and draft sleep for a step; they wait for one another",
        "floor: the engines' time and two round trips of bare frames of the same size over a socket, same run",
        "relay: a step with nothing between the services but a process that passes frames on",
        "grpc, sse: a step with the gateway and so many clients; adds: what is more than the relay's, over engines",
        "cpu: processor time a step, all threads of a process; clients run on the same cores",
        f"medians of {args.rounds} rounds, in each of which relay, gRPC and SSE take turns",
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
                    for door in ("grpc", "sse") if engines else ():
                        row[f"{door}_adds"] = (row[f"{door}_ms"] - row["relay_ms"]) / engines
                    report.add(sessions=sessions, engines_ms=engines, floor_ms=engines + 2e-3 * floors[sessions], **row)
        if args.profile:
            with system(folder, args.engines_ms[-1]) as running:
                most = max(args.sessions)
                for door, ask, port in doors(running):
                    report.more.append(
                        (
                            f"Where the gateway's processor time goes, {most} clients over {_NAMES[door]}",
                            profiled(running.pids["gateway"], lambda: uvloop.run(ask(port, most, 800))),  # noqa: B023
                        )
                    )
    _plot(report)
    report.write()


def _plot(report: Report) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    most = max(row["sessions"] for row in report.rows)
    rows = [row for row in report.rows if row["sessions"] == most]
    x = range(len(rows))
    for name, style in (("floor", "k--"), ("relay", "ko:"), ("grpc", "o-"), ("sse", "o-")):
        spent = [row[f"{name}_ms"] - row["engines_ms"] for row in rows]
        axes.plot(x, spent, style, label=name)
    bound = [row["relay_ms"] - 0.9 * row["engines_ms"] for row in rows]
    axes.plot(x, bound, color="grey", lw=0.8, label="relay, and a tenth of the engines' time")
    axes.set(xlabel="engines, ms a step", ylabel="ms a step beyond the engines'", title=f"{most} sessions")
    axes.set_xticks(list(x), [f"{row['engines_ms']:g}" for row in rows])
    axes.grid(alpha=0.3)
    axes.set_ylim(0)
    figure.legend(fontsize=8, loc="outside lower center", ncol=5)
    report.save(figure)
