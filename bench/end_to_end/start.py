"""Time from `outrider serve` to health, cold and warm: by process and phase, with bytes read and peak memory.

A cold start has an empty cache folder (OUTRIDER_CACHE), so that a GGUF file is converted, weights are packed and costs
are measured; a warm one follows it with the same folder. The files of the installation and the model are in the
system's page cache in both, and the kernels are compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.harness import flags
from bench.harness.processes import free_port, start, wait_until
from bench.harness.report import Report
from outrider.checkpoints.checkpoint import display_name
from outrider.config import DEFAULT_MODEL

COLUMNS = ("start", "process", "ready_s", "cpu_s", "read_mb", "disk_mb", "peak_mb", "shared_mb")
_STARTED = re.compile(r"start-up took ([\d.]+) s, ([\d.]+) s of processor time: (.*)$")
_PHASE = re.compile(r"([^,]+?) ([\d.]+)(?:, |$)")
_ROLES = ("target", "draft", "gateway")  # besides the supervisor, `serve`
_TIMEOUT = 1800.0  # seconds; a large file is converted in them
_STEP_DOWN = 120.0  # seconds for a system to end
_MEGA = 1e6
_PACKED_SECONDS = 20.0  # within which a system writes packed weights, if it does
_POLL_SECONDS = 0.1


@dataclass
class ProcessStart:
    """One process of a start. seconds: from its own start until it is ready; phases: in their order.

    processor: seconds of it and its ended children. read: bytes of read calls, without mapped files; disk: bytes that
    the disk delivered. peak: most resident bytes; proportional: bytes at the end, shared ones divided by their users
    """

    seconds: float = 0.0
    processor: float = 0.0
    read: int = 0
    disk: int = 0
    peak: int = 0
    proportional: int = 0
    phases: dict[str, float] = field(default_factory=dict)


@dataclass
class SystemStart:
    """A start of the system. serving, health: seconds until it serves, and until its draft is ready, too."""

    serving: float
    health: float
    processes: dict[str, ProcessStart]


def phases_of(log: str) -> dict[str, ProcessStart]:
    """What the processes report of their start-up, by role. log: the output of `serve`, in text lines."""
    found = {}
    for line in log.splitlines():
        report = _STARTED.search(line)
        if report is None:
            continue
        role = line.split()[1]  # behind the time
        phases = {name: float(seconds) for name, seconds in _PHASE.findall(report[3])}
        found[role] = ProcessStart(float(report[1]), float(report[2]), phases=phases)
    return found


def measure(model: str, more: Sequence[str], cache: Path) -> SystemStart:
    """Start a system, wait until it is healthy, and end it. Raises BenchError."""
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "outrider", "serve", "--model-path", model, "--port", str(port)]
    command += ["--grpc-port", str(grpc_port), "--disable-draft-self-test", *more]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        environment = {**os.environ, "OUTRIDER_CACHE": str(cache)}
        began = time.monotonic()
        process = start(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        serving: list[float] = []

        def healthy() -> bool:
            status = _status(port)
            if status in ("ok", "degraded") and not serving:
                serving.append(time.monotonic() - began)
            return status == "ok"

        try:
            wait_until(process, healthy, _TIMEOUT, lambda: _tail(log))
            health = time.monotonic() - began
            time.sleep(0.5)  # for the lines that follow the last one's readiness
            found = phases_of(_text(log))
            for role, pid in _processes(process.pid):
                add_usage(found.setdefault(role, ProcessStart()), pid)
            _await_packed_weights(cache)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(_STEP_DOWN)
    return SystemStart(serving[0], health, found)


def _await_packed_weights(cache: Path) -> None:
    """Wait until the target has written its packed weights, which it does after the start, or for some seconds."""
    deadline = time.monotonic() + _PACKED_SECONDS
    while not list(cache.glob("packed/*.weights")) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _status(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        connection.request("GET", "/health")
        content = json.loads(connection.getresponse().read())
        return str(content.get("status", "")) if isinstance(content, dict) else ""
    return ""


def _text(log: IO[str]) -> str:
    log.seek(0)
    return log.read()


def _tail(log: IO[str]) -> str:
    return "\n".join(_text(log).splitlines()[-5:])


def _processes(supervisor: int) -> Iterator[tuple[str, int]]:
    """Role and id of the running processes of a system."""
    yield "serve", supervisor
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        role = next((word for word in words if word in _ROLES), None)
        if role is not None:
            yield role, int(pid)


def add_usage(process: ProcessStart, pid: int) -> None:
    """Add what the system reports of a process, nothing of one that has ended."""
    io, status, rollup = (_fields(f"/proc/{pid}/{name}") for name in ("io", "status", "smaps_rollup"))
    process.read, process.disk = io.get("rchar", 0), io.get("read_bytes", 0)
    process.peak = 1024 * status.get("VmHWM", 0)
    process.proportional = 1024 * rollup.get("Pss", 0)


def _fields(path: str) -> dict[str, int]:
    """The numbers of a file of the system with a name and a number on each line; empty where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}


def median_of(starts: Sequence[SystemStart]) -> SystemStart:
    """The start whose time to health is the median, the lower one of an even number."""
    return sorted(starts, key=lambda one: one.health)[(len(starts) - 1) // 2]


def add_rows(report: Report, kind: str, chosen: SystemStart) -> None:
    """Add a row for the system and one for each of its processes."""
    parts = chosen.processes
    report.add(
        start=kind, process="all", ready_s=chosen.health,
        **_usage_row([parts[role] for role in parts]),
    )  # fmt: skip
    for role in ("serve", *_ROLES):
        if role in parts:
            report.add(start=kind, process=role, ready_s=parts[role].seconds, **_usage_row([parts[role]]))


def _usage_row(processes: Sequence[ProcessStart]) -> dict[str, float]:
    def total(name: str) -> float:
        return sum(float(getattr(one, name)) for one in processes)

    return {
        "cpu_s": total("processor"), "read_mb": total("read") / _MEGA, "disk_mb": total("disk") / _MEGA,
        "peak_mb": total("peak") / _MEGA, "shared_mb": total("proportional") / _MEGA,
    }  # fmt: skip


def phase_rows(starts: dict[str, SystemStart]) -> list[dict[str, Any]]:
    """A row for each phase of each process, with a column for each kind of start."""
    names: dict[tuple[str, str], None] = {}
    for one in starts.values():
        names |= {(role, phase): None for role, process in one.processes.items() for phase in process.phases}
    order = ("serve", *_ROLES)
    rows = []
    for role, phase in sorted(names, key=lambda pair: order.index(pair[0])):
        seconds = {kind: one.processes.get(role, ProcessStart()).phases.get(phase, 0.0) for kind, one in starts.items()}
        rows.append({"process": role, "phase": phase, **seconds})
    return rows


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/start.*."""
    parser = argparse.ArgumentParser(prog="outrider bench start", description=__doc__)
    parser.add_argument("--model-path", default=DEFAULT_MODEL, help="as of outrider serve")
    parser.add_argument("--rounds", type=flags.positive_int, default=3, help="cold and warm starts; medians are shown")
    parser.add_argument("--name", default="start", help="name of the report")
    parser.add_argument("flags", nargs="*", help="further flags of outrider serve, behind --")
    args = parser.parse_args(argv)
    title = f"Start of {Path(display_name(args.model_path)).name}"
    report = Report(args.name, title, columns=COLUMNS)
    starts: dict[str, list[SystemStart]] = {"cold": [], "warm": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="outrider-cache-") as cache:
            for kind, done in starts.items():
                done.append(measure(args.model_path, args.flags, Path(cache)))
                print(f"{kind}: serves after {done[-1].serving:.2f} s, ok after {done[-1].health:.2f} s", flush=True)
    chosen = {kind: median_of(done) for kind, done in starts.items()}
    for kind, one in chosen.items():
        add_rows(report, kind, one)
    report.more = [("Phases, in seconds", phase_rows(chosen))]
    spread = {
        kind: ", ".join(f"{one.health:.1f}" for one in sorted(done, key=lambda one: one.health))
        for kind, done in starts.items()
    }
    warm = statistics.median(one.serving for one in starts["warm"])
    report.notes = [
        "cold: with an empty cache folder; warm: with the folder that the cold start left, which ran until its packed "
        "weights were written. In both, the page cache has "
        "the files of the installation and the model, and the kernels are compiled",
        "ready_s, process all: from the command to `status: ok` of GET /health, in the run that is the median; of a "
        "process: from its own start until it is ready, the gateway's time to the target included",
        f"all runs, in seconds to health: cold {spread['cold']}; warm {spread['warm']}, serving without the draft "
        f"after {warm:.1f}",
        "cpu_s: processor time, with that of ended children; read_mb: of read calls, without mapped files; disk_mb: "
        "that the disk delivered; peak_mb: most resident memory; shared_mb: at the end, memory of several processes "
        "divided among them",
    ]  # fmt: skip
    report.write()
