"""`outrider serve` as a user would start it, conversations over REST, and how speculation went in them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import httpx

from bench.harness.errors import BenchError
from bench.harness.processes import start
from bench.harness.prompts import Prompt
from bench.serve import load, measures
from bench.serve.client import Target
from bench.serve.measures import seconds_of
from bench.serve.outcome import Outcome

_SAID = 3  # last lines of a system that does not start


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(model: str, flags: Sequence[str], dtype: str, most: int = 8) -> Iterator[str]:
    """`outrider serve` while the context lasts; yields its base URL. Raises BenchError if it does not come up.

    flags: "{model}" in them is the model. most: requests that run together.
    """
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "outrider", "serve", "--model-path", model, "--dtype", dtype]
    command += ["--port", str(port), "--grpc-port", str(grpc_port), "--log-level", "warning"]
    command += ["--max-running-requests", str(most), "--disable-draft-self-test"]
    command += [flag.replace("{model}", model) for flag in flags]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = start(command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True)
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
    """Until it can be asked. Raises BenchError with what it said last if it ends, or is not ready in five minutes."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said.seek(0)
            last = " / ".join(_words(said.read())[-_SAID:])
            raise BenchError(f"{command} ended with code {process.returncode}: {last}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.25)
    raise BenchError(f"{command} was not ready in five minutes")


def _words(text: str) -> list[str]:
    """The lines of a text that say something, without the box that stands around what flags are refused for."""
    lines = (re.sub(r"[\u2500-\u257f]+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


async def ask(
    url: str,
    conversations: Sequence[Sequence[str]],
    concurrency: int,
    body: Mapping[str, Any],
    done: Callable[[Outcome], None] = lambda _: None,
) -> tuple[float, list[list[Outcome]]]:
    """Hold conversations, `concurrency` at a time. Returns seconds, and what came of each one's turns in order.

    conversations: what the user says, turn by turn. body: of every request; the seed is the conversation's number.
    Answers come whole, which costs the least. done: called after every request. Raises BenchError if one fails.
    """
    prompts = [Prompt("all", tuple(turns)) for turns in conversations]
    target = Target(url, body={**body, "stream": False})
    talks = await load.hold(target, prompts, load.Plan(concurrency), done)
    answers = load.checked([outcome for talk in talks for outcome in talk])
    return seconds_of(answers), talks


def new_tokens(answers: Iterable[Outcome]) -> int:
    """Tokens of answers."""
    return sum(answer.output_tokens for answer in answers)


def speculation(answers: Sequence[Outcome]) -> dict[str, float]:
    """Accept length (tokens a step, bonus included) and acceptance rate; 1 and 0 where nothing was drafted."""
    found = measures.speculation(answers)
    length, rate = (found.accept_length, found.acceptance_rate or 0.0) if found else (1.0, 0.0)
    return {"accept_length": length, "acceptance_rate": rate}
