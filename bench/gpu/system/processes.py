"""The three processes of the measured system: services with clocks, and a gateway as it is, on Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.gpu.system.checkpoints import ModelSizes, sizes_as_json, write_pair
from bench.harness.errors import BenchError
from bench.harness.processes import free_port, running, wait_until
from outrider.supervisor.health import is_healthy

_STARTUP_TIMEOUT = 120.0  # seconds of a gateway
_LOG_BYTES = 3000  # of a service that does not start, quoted in the error


@contextlib.contextmanager
def services(
    folder: Path, target: Sequence[str], draft: Sequence[str], simulated: dict[str, Any] | None, seconds: float
) -> Iterator[None]:
    """Target and draft service, with sockets and recordings in a folder. They start at the same time.

    target, draft: their flags. simulated: options of simulated acceptance, or None. seconds: for each to start;
    compiling the draft's programs takes most of it
    """
    options = json.dumps({"folder": str(folder), "simulated": simulated})
    commands = {
        "target": ["bench.gpu.system.target", str(folder), "--listen", f"unix:{folder}/target.sock", *target],
        "draft": ["bench.gpu.system.draft", options, "--listen", f"unix:{folder}/draft.sock", *draft],
    }
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(_module(folder, name, *command)) for name, command in commands.items()}
        for name, process in started.items():
            address = f"unix:{folder}/{name}.sock"
            wait_until(process, partial(_healthy, address), seconds, _log_of(folder, name))
        yield


@contextlib.contextmanager
def gateway(folder: Path, transport: str) -> Iterator[str]:
    """A gateway between the services of a folder; yields its base URL. transport: --stream-transport"""
    port, grpc_port = free_port(), free_port()
    flags = ["--target", f"unix:{folder}/target.sock", "--draft", f"unix:{folder}/draft.sock", "--port", str(port)]
    flags += ["--grpc-port", str(grpc_port), "--stream-transport", transport]
    flags += ["--disable-draft-self-test", "--accept-any-model"]
    url = f"http://127.0.0.1:{port}"
    with _module(folder, "gateway", "outrider", "gateway", *flags) as process:
        wait_until(process, lambda: _ready(url), _STARTUP_TIMEOUT, _log_of(folder, "gateway"))
        yield url


def ask_once(url: str, prompt: Sequence[int]) -> None:
    """Let the whole system answer a prompt with a few tokens. Raises BenchError if it does not."""
    body = {"model": "default", "prompt": list(prompt), "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    try:
        httpx.post(f"{url}/v1/completions", json=body, timeout=_STARTUP_TIMEOUT).raise_for_status()
    except httpx.HTTPError as error:
        raise BenchError(f"the system does not answer: {error}") from None


def write_checkpoints(folder: Path, sizes: ModelSizes, device: str) -> tuple[Path, Path]:
    """Write the random target and its head, in a process of its own, which leaves no memory of the device taken.

    Returns their folders.
    """
    if device == "cpu":
        return write_pair(folder, sizes, device)
    command = [sys.executable, "-m", "bench.gpu.system.checkpoints", str(folder), sizes_as_json(sizes), device]
    subprocess.run(command, check=True)
    return folder / "target", folder / "head"


@contextlib.contextmanager
def _module(folder: Path, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module as a process, with its output in NAME.log."""
    with (
        (folder / f"{name}.log").open("wb") as log,
        running([sys.executable, "-m", *command, "--log-level", "warning"], stdout=log, stderr=log) as process,
    ):
        yield process


def _log_of(folder: Path, name: str) -> Any:
    return lambda: (folder / f"{name}.log").read_text(errors="replace")[-_LOG_BYTES:]


def _healthy(address: str) -> bool:
    return asyncio.run(is_healthy(address, 2.0))


def _ready(url: str) -> bool:
    """True if all services of the gateway are up. Raises BenchError if the target cannot serve the draft."""
    with contextlib.suppress(httpx.HTTPError):
        health = httpx.get(f"{url}/health", timeout=2).json()
        for draft in health.get("drafts", ()):
            if draft["state"] == "refused":
                raise BenchError(f"the gateway refuses the draft service: {draft['reason']}")
        return bool(health["status"] == "ok")
    return False
