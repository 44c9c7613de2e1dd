"""A target that stays, and gateways with a simulated draft and a network in front of it, one after the other.

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
from bench.harness.processes import running, wait_until
from bench.serve.outrider_system import free_port
from outrider.client import AsyncClient
from outrider.supervisor.health import is_healthy

_PATIENCE = 300.0  # seconds until a process serves


@dataclass(frozen=True)
class Draft:
    """What the draft is like. acceptance: 0 to 1; seconds: that a proposal takes; delay: of the network, one way, in
    seconds; tokens: of a chain
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
        wait_until(process, lambda: asyncio.run(is_healthy(address, 2.0)), _PATIENCE)
        yield address


@contextlib.contextmanager
def gateway(folder: Path, target_address: str, draft: Draft | None = None) -> Iterator[str]:
    """A gateway, with a simulated draft if there is to be one, that knows texts.json; yields the gRPC address."""
    port, grpc_port = free_port(), free_port()
    flags = ["--target", target_address, "--port", str(port), "--grpc-port", str(grpc_port), "--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        if draft is not None:
            oracle, far = folder / "oracle", folder / "far"
            for socket in (oracle, far):
                socket.unlink(missing_ok=True)
            facts = [str(fact) for fact in (draft.acceptance, draft.seconds, draft.tokens)]
            texts = str(folder / "texts.json")
            process = stack.enter_context(_module("bench.scale.oracle", f"unix:{oracle}", texts, *facts))
            wait_until(process, lambda: asyncio.run(is_healthy(f"unix:{oracle}", 2.0)), _PATIENCE)
            if draft.delay:
                stack.enter_context(_module("bench.scale.delay", str(far), str(oracle), str(draft.delay)))
            flags += ["--draft", f"unix:{far if draft.delay else oracle}"]
        process = stack.enter_context(_module("outrider", "gateway", *flags))
        wait_until(process, lambda: _serves(port), _PATIENCE)
        yield f"127.0.0.1:{grpc_port}"


def _serves(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=2)
        return health.status_code == 200 and "plainly" not in health.text
    return False


@dataclass(frozen=True)
class Told:
    """An answer. tokens: new ids; rate: tokens a second between its first part and its last; accept: tokens a step."""

    tokens: tuple[int, ...]
    rate: float
    accept: float


async def tell(address: str, prompts: Sequence[Sequence[int]], new: int, hints: bool) -> list[Told]:
    """Greedy answers of `new` tokens to all prompts at once. hints: whether steps may verify any.

    Raises BenchError if one comes in a single part, which tells of no rate.
    """

    async def one(client: AsyncClient, prompt: Sequence[int]) -> Told:
        options: dict[str, Any] = {"max_tokens": new, "temperature": 0.0, "ignore_eos": True}
        if not hints:
            options["max_draft_tokens"] = 0
        tokens: list[int] = []
        first, began, steps = 0, 0.0, 0
        async for part in client.generate(prompt, **options):
            now = time.perf_counter()
            tokens += part.token_ids
            if not first and tokens:
                first, began = len(tokens), now
            steps = part.speculation.steps or steps
        if len(tokens) == first:
            raise BenchError(f"all {len(tokens)} tokens came at once; ask for more of them (--new-tokens)")
        return Told(tuple(tokens), (len(tokens) - first) / (now - began), len(tokens) / max(1, steps))

    async with AsyncClient(address) as client:
        return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))


def remember(folder: Path, texts: Sequence[Sequence[int]]) -> None:
    """Leave whole sequences for the oracle."""
    (folder / "texts.json").write_text(json.dumps([list(text) for text in texts]))
