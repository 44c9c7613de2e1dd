"""The processes of a run, on Unix sockets: a gateway, a target on one core, and a draft service on another.

clients ── gateway ──────────────── target    control.py says what both services do
               └────── delay ────── draft
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.ahead.control import Counts, Mode, Setting, read_counts, write
from bench.ahead.network import Delay, delayed
from bench.harness.errors import BenchError
from bench.harness.processes import free_port, running, wait_until
from outrider.client import AsyncClient
from outrider.supervisor.health import is_healthy

_STARTUP_TIMEOUT = 400.0  # seconds; compiling the draft's programs takes most of it
_COUNTS_TIMEOUT = 5.0
_LOG_BYTES = 3000  # of a process that does not start, quoted in the error


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one request. rate: tokens/s from the first part to the last.

    steps, drafted: of the target behind the first token, and those with draft tokens; step_tokens: that they committed
    """

    tokens: tuple[int, ...]
    rate: float
    steps: int
    drafted: int
    step_tokens: int


class System:
    """The running processes. delay: of the network."""

    def __init__(self, folder: Path, address: str, delay: Delay) -> None:
        self._folder, self._address, self.delay = folder, address, delay

    def set(self, mode: Mode, step_ms: float, delay_ms: float) -> None:
        """What the services do from the next request on, and the delay of the network from now on."""
        write(self._folder / "control", Setting(mode, step_ms, delay_ms))
        self.delay.seconds = delay_ms / 1e3

    def ask(self, text: str, new: int, *, speculate: bool = True) -> Answer:
        """One greedy answer of `new` tokens."""
        before = read_counts(self._folder / "counts")
        tokens, first, rate = asyncio.run(self._generate(text, new, speculate))
        counts = self._counts_after(before)
        steps, drafted = counts.steps - before.steps, counts.drafted - before.drafted
        return Answer(tokens, rate, steps, drafted, len(tokens) - first)

    async def _generate(self, text: str, new: int, speculate: bool) -> tuple[tuple[int, ...], int, float]:
        tokens: list[int] = []
        first, start, now = 0, 0.0, 0.0
        options: dict[str, Any] = {"max_tokens": new, "temperature": 0.0, "ignore_eos": True}
        options |= {} if speculate else {"max_draft_tokens": 0}
        async with AsyncClient(self._address) as client:
            chat = [{"role": "user", "content": text}]
            async for part in client.generate(chat, **options):
                now = time.perf_counter()
                tokens += part.token_ids
                if not first and tokens:
                    first, start = len(tokens), now
        if len(tokens) == first:
            raise BenchError(f"all {len(tokens)} tokens arrived together; increase --new-tokens")
        return tuple(tokens), first, (len(tokens) - first) / (now - start)

    def _counts_after(self, before: Counts) -> Counts:
        end = time.monotonic() + _COUNTS_TIMEOUT
        while (counts := read_counts(self._folder / "counts")).sessions == before.sessions:
            if time.monotonic() > end:
                raise BenchError("the target does not report the end of a session")
            time.sleep(0.002)
        return counts


@contextlib.contextmanager
def started(folder: Path, target_flags: Sequence[str], draft_flags: Sequence[str]) -> Iterator[System]:
    """All processes for the duration of the context; their sockets and logs are in a folder.

    With two cores and more, the target has the first one, the draft service the last one.
    """
    cores = sorted(os.sched_getaffinity(0))
    target, draft, far = (folder / name for name in ("target", "draft", "far"))
    control, port, grpc_port = folder / "control", free_port(), free_port()
    write(control, Setting(Mode.WAITING, 0.0, 0.0))
    common = ["--max-running-requests", "1", "--log-level", "warning"]
    commands = {
        "target": ["bench.ahead.target", str(control), str(folder / "counts"), "--listen", f"unix:{target}",
                   "--cores", str(cores[0]), "--self-speculation", "off", *common, *target_flags],
        "draft": ["bench.ahead.draft", str(control), "--listen", f"unix:{draft}", "--cores", str(cores[-1]),
                  *common, *draft_flags],
    }  # fmt: skip
    gateway = ["outrider", "gateway", "--target", f"unix:{target}", "--draft", f"unix:{far}", "--port", str(port)]
    gateway += ["--grpc-port", str(grpc_port), "--disable-draft-self-test", "--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        services = {name: stack.enter_context(_module(folder, name, *command)) for name, command in commands.items()}
        for name, process in services.items():
            wait_until(process, partial(_healthy, f"unix:{folder / name}"), _STARTUP_TIMEOUT, _log(folder, name))
        delay = stack.enter_context(delayed(far, draft))
        process = stack.enter_context(_module(folder, "gateway", *gateway))
        wait_until(process, partial(_ready, port), _STARTUP_TIMEOUT, _log(folder, "gateway"))
        yield System(folder, f"127.0.0.1:{grpc_port}", delay)


@contextlib.contextmanager
def _module(folder: Path, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module as a process, with its output in NAME.log."""
    with (
        (folder / f"{name}.log").open("wb") as log,
        running([sys.executable, "-m", *command], stdout=log, stderr=log) as process,
    ):
        yield process


def _log(folder: Path, name: str) -> partial[str]:
    return partial(_tail, folder / f"{name}.log")


def _tail(file: Path) -> str:
    return file.read_text(errors="replace")[-_LOG_BYTES:]


def _healthy(address: str) -> bool:
    return asyncio.run(is_healthy(address, 2.0))


def _ready(port: int) -> bool:
    """True if all services of the gateway are up."""
    with contextlib.suppress(httpx.HTTPError):
        return bool(httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).json()["status"] == "ok")
    return False
