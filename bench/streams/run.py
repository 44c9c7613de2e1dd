"""The streaming path with fake engines at 1, 8 and 64 sessions, beside the floor of a bare grpc.aio ping-pong.

One step is target -> gateway -> draft -> gateway -> target: two round trips. The floor is two round trips of a bare
stream with frames of the same size in the same run. Processor time is that of the whole process, all threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import uvloop

from bench.report import Report
from bench.serving import free_port
from bench.streams.pingpong import round_trips
from outrider.wire.v1 import gateway_pb2, gateway_pb2_grpc

ROLES = ("gateway", "target", "draft")
_TICK = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def system(folder: str) -> Iterator[tuple[dict[str, int], int]]:
    """Fake services and the real gateway; yields process ids by role and the gateway's gRPC port."""
    port, grpc_port = free_port(), free_port()
    addresses = {role: f"unix:{folder}/{role}" for role in ("target", "draft")}
    command = [sys.executable, "-m", "bench.streams.fakes"]
    processes = {role: subprocess.Popen([*command, role, address]) for role, address in addresses.items()}
    flags = ["--target", addresses["target"], "--draft", addresses["draft"], "--log-level", "warning"]
    gateway = [sys.executable, "-m", "gateway", *flags, "--port", str(port), "--grpc-port", str(grpc_port)]
    processes["gateway"] = subprocess.Popen(gateway)
    try:
        for _ in range(240):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.25)
        yield {role: process.pid for role, process in processes.items()}, grpc_port
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(20)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


async def generate(grpc_port: int, sessions: int, tokens: int) -> float:
    """So many sessions of so many tokens at once. Returns seconds."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def one(index: int) -> None:
            prompt = gateway_pb2.TokenIds(ids=[index, index + 1])
            request = gateway_pb2.GenerateRequest(token_ids=prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
            async for part in stub.Generate(request):
                if part.finish_reason:
                    assert part.completion_tokens == tokens

        start = time.perf_counter()
        await asyncio.gather(*(one(i) for i in range(sessions)))
        return time.perf_counter() - start


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/streams.*."""
    parser = argparse.ArgumentParser(prog="outrider bench streams", description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args(argv)
    report = Report("streams", "Streaming path with engines that cost nothing, in microseconds")
    report.notes = [
        "step: commits of all sessions to gateway and draft, proposals back to the target, parts to the clients",
        "floor: two round trips of a bare grpc.aio stream with frames of the same size, same run, Unix sockets",
        "cpu: processor time a step, of the process and all its threads; clients run on the same cores",
    ]
    with tempfile.TemporaryDirectory() as folder:
        sizes = {n: 40 * n + 40 for n in args.sessions}
        floors = dict(zip(args.sessions, round_trips(f"unix:{folder}/echo", list(sizes.values())), strict=True))
        with system(folder) as (pids, grpc_port):
            uvloop.run(generate(grpc_port, 2, 200))
            for sessions in args.sessions:
                steps = max(200, args.steps // max(1, sessions // 8))
                before = {role: cpu_seconds(pids[role]) for role in ROLES}
                seconds = uvloop.run(generate(grpc_port, sessions, 2 * steps))
                cpu = {role: 1e6 * (cpu_seconds(pids[role]) - before[role]) / steps for role in ROLES}
                wall = 1e6 * seconds / steps
                report.add(
                    sessions=sessions,
                    step_us=wall,
                    floor_us=2 * floors[sessions],
                    ratio=wall / (2 * floors[sessions]),
                    step_us_per_session=wall / sessions,
                    **{f"{role}_cpu_us": cpu[role] for role in ROLES},
                    gateway_cpu_us_per_session=cpu["gateway"] / sessions,
                )
    _plot(report)
    report.write()


def _plot(report: Report) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    x = [row["sessions"] for row in report.rows]
    axes.plot(x, [row["step_us"] for row in report.rows], "o-", label="step, wall")
    axes.plot(x, [row["floor_us"] for row in report.rows], "k--", label="floor: two bare round trips")
    for role in ROLES:
        axes.plot(x, [row[f"{role}_cpu_us"] for row in report.rows], "o:", label=f"{role}, processor time")
    axes.set(xscale="log", yscale="log", xlabel="sessions", ylabel="microseconds a step", xticks=x, xticklabels=x)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    report.save(figure)
