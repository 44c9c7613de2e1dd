"""A real target service, and gateways with a simulated draft service and network delay, started one after another.

clients ── gateway ──────────────────── target    (real)
               └──── delay ──── oracle            (simulated)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.harness.errors import BenchError
from bench.harness.processes import free_port, running, wait_until
from outrider.client import AsyncClient
from outrider.supervisor.health import is_healthy

_STARTUP_TIMEOUT = 300.0  # seconds


@dataclass(frozen=True)
class Draft:
    """A simulated draft service.

    acceptance: probability that a draft token is correct, 0 to 1
    seconds: latency of a proposal
    delay: one-way latency of the network in seconds
    tokens: draft tokens of a chain
    """

    acceptance: float = 0.8
    seconds: float = 0.001
    delay: float = 0.0
    tokens: int = 16


def _module(*command: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """A Python module as a process."""
    return running([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def target(folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """A target service; yields its address."""
    address = f"unix:{folder}/target"
    with _module("outrider", "target", "--listen", address, "--log-level", "warning", *flags) as process:
        wait_until(process, lambda: asyncio.run(is_healthy(address, 2.0)), _STARTUP_TIMEOUT)
        yield address


@contextlib.contextmanager
def gateway(folder: Path, target_address: str, draft: Draft | None = None) -> Iterator[str]:
    """A gateway, with a simulated draft service for texts.json unless None; yields its gRPC address."""
    port, grpc_port = free_port(), free_port()
    flags = ["--target", target_address, "--port", str(port), "--grpc-port", str(grpc_port), "--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        if draft is not None:
            oracle, far = folder / "oracle", folder / "far"
            for socket in (oracle, far):
                socket.unlink(missing_ok=True)
            options = [str(option) for option in (draft.acceptance, draft.seconds, draft.tokens)]
            texts = str(folder / "texts.json")
            process = stack.enter_context(_module("bench.scale.oracle", f"unix:{oracle}", texts, *options))
            wait_until(process, lambda: asyncio.run(is_healthy(f"unix:{oracle}", 2.0)), _STARTUP_TIMEOUT)
            if draft.delay:
                stack.enter_context(_module("bench.scale.delay", str(far), str(oracle), str(draft.delay)))
            flags += ["--draft", f"unix:{far if draft.delay else oracle}"]
        process = stack.enter_context(_module("outrider", "gateway", *flags))
        wait_until(process, lambda: _ready(port), _STARTUP_TIMEOUT)
        yield f"127.0.0.1:{grpc_port}"


def _ready(port: int) -> bool:
    """True if all services of the gateway are up."""
    with contextlib.suppress(httpx.HTTPError):
        return bool(httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).json()["status"] == "ok")
    return False


@dataclass(frozen=True)
class Generation:
    """An answer. tokens: new ids; rate: tokens/s from the first part to the last; accept: accept length."""

    tokens: tuple[int, ...]
    rate: float
    accept: float


async def generate(address: str, prompts: Sequence[Sequence[int]], new: int, speculate: bool) -> list[Generation]:
    """Greedy answers of `new` tokens to all prompts, concurrently. speculate: False sets max_draft_tokens to 0.

    Raises BenchError if an answer arrives in a single part, because it has no rate.
    """

    async def one(client: AsyncClient, prompt: Sequence[int]) -> Generation:
        options: dict[str, Any] = {"max_tokens": new, "temperature": 0.0, "ignore_eos": True}
        if not speculate:
            options["max_draft_tokens"] = 0
        tokens: list[int] = []
        first, start, steps = 0, 0.0, 0
        async for part in client.generate(prompt, **options):
            now = time.perf_counter()
            tokens += part.token_ids
            if not first and tokens:
                first, start = len(tokens), now
            steps = part.speculation.steps or steps
        if len(tokens) == first:
            raise BenchError(f"all {len(tokens)} tokens arrived together; increase --new-tokens")
        return Generation(tuple(tokens), (len(tokens) - first) / (now - start), len(tokens) / max(1, steps))

    async with AsyncClient(address) as client:
        return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))


def write_texts(folder: Path, texts: Sequence[Sequence[int]]) -> None:
    """Write the sequences that the simulated draft service knows."""
    (folder / "texts.json").write_text(json.dumps([list(text) for text in texts]))
