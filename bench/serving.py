"""`outrider serve` as a user would start it, conversations over REST, and how speculation went in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import httpx

Answer = dict[str, Any]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(model: str, flags: Sequence[str], dtype: str, most: int = 8) -> Iterator[str]:
    """`outrider serve` while the context lasts; yields its base URL. Raises RuntimeError if it does not come up.

    flags: "{model}" in them is the model. most: requests that run together.
    """
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "outrider", "serve", "--model-path", model, "--dtype", dtype]
    command += ["--port", str(port), "--grpc-port", str(grpc_port), "--log-level", "warning"]
    command += ["--max-running-requests", str(most), "--disable-draft-self-test"]
    command += [flag.replace("{model}", model) for flag in flags]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True)
        try:
            _wait(process, url, shlex.join(command), said)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


def _wait(process: subprocess.Popen[bytes], url: str, command: str, said: IO[str]) -> None:
    """Until it can be asked. Raises RuntimeError with what it said last if it ends, or is not ready in five minutes."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said.seek(0)
            last = " / ".join(said.read().splitlines()[-3:])
            raise RuntimeError(f"{command} ended with code {process.returncode}: {last}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.25)
    raise RuntimeError(f"{command} was not ready in five minutes")


async def ask(
    url: str,
    conversations: Sequence[Sequence[str]],
    concurrency: int,
    body: Answer,
    done: Callable[[], None] = lambda: None,
) -> tuple[float, list[list[Answer]]]:
    """Hold conversations, `concurrency` at a time. Returns seconds, and the answers to each one's turns in order.

    conversations: what the user says, turn by turn. body: of every request; the seed is the conversation's number.
    done: called after every conversation.
    """
    gate = asyncio.Semaphore(concurrency)

    async def one(client: httpx.AsyncClient, index: int, turns: Sequence[str]) -> list[Answer]:
        messages: list[dict[str, str]] = []
        answers: list[Answer] = []
        async with gate:
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                request = {**body, "seed": index, "messages": messages}
                response = await client.post("/v1/chat/completions", json=request)
                response.raise_for_status()
                answers.append(response.json())
                messages.append({"role": "assistant", "content": text_of(answers[-1])})
        done()
        return answers

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        start = time.perf_counter()
        answers = await asyncio.gather(*(one(client, i, turns) for i, turns in enumerate(conversations)))
        return time.perf_counter() - start, list(answers)


def text_of(answer: Answer) -> str:
    """What was answered."""
    return str(answer["choices"][0]["message"]["content"])


def new_tokens(answers: Iterable[Answer]) -> int:
    """Tokens of answers."""
    return sum(answer["usage"]["completion_tokens"] for answer in answers)


def speculation(answers: Sequence[Answer]) -> dict[str, float]:
    """Accept length (tokens a step, bonus included) and acceptance rate, from the usage that the gateway reports."""
    total = new_tokens(answers)
    details = [answer["usage"]["completion_tokens_details"] for answer in answers]
    accepted, rejected = (sum(d[f"{kind}_prediction_tokens"] for d in details) for kind in ("accepted", "rejected"))
    rate = accepted / max(1, accepted + rejected)
    return {"accept_length": total / max(1, total - accepted), "acceptance_rate": rate}
