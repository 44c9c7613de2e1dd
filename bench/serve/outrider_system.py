"""`outrider serve` as a user starts it, conversations with it over REST, and their speculation figures."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import httpx

from bench.harness.errors import BenchError
from bench.harness.processes import free_port, start
from bench.harness.prompts import Prompt
from bench.serve import load, metrics
from bench.serve.client import Target
from bench.serve.metrics import seconds_of
from bench.serve.outcome import Outcome
from outrider.config.access.callers import ADMIN_KEYS_VARIABLE

_LAST_LINES = 3  # of the stderr of a system that does not start, quoted in the error
_STARTUP_TIMEOUT = 300.0  # seconds
_ADMIN_KEY = secrets.token_hex(16)

ADMIN_HEADERS = {"authorization": f"Bearer {_ADMIN_KEY}"}
"""Headers that open the control routes of a system that `served` started."""


@contextlib.contextmanager
def served(model: str, flags: Sequence[str], dtype: str, max_running: int = 8) -> Iterator[str]:
    """`outrider serve` for the duration of the context; yields its base URL. Raises BenchError if it does not start.

    flags: "{model}" in them is replaced by the model. max_running: --max-running-requests
    """
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "outrider", "serve", "--model-path", model, "--dtype", dtype]
    command += ["--port", str(port), "--grpc-port", str(grpc_port), "--log-level", "warning"]
    command += ["--max-running-requests", str(max_running), "--disable-draft-self-test"]
    command += [flag.replace("{model}", model) for flag in flags]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        environment = {**os.environ, ADMIN_KEYS_VARIABLE: _ADMIN_KEY}
        process = start(command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True, env=environment)
        try:
            _wait(process, url, shlex.join(command), log)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


def _wait(process: subprocess.Popen[bytes], url: str, command: str, log: IO[str]) -> None:
    """Poll /health until all services are up.

    Raises BenchError with the last lines of the log if the process ends, or after five minutes.
    """
    deadline = time.monotonic() + _STARTUP_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            last = " / ".join(_plain_lines(log.read())[-_LAST_LINES:])
            raise BenchError(f"{command} ended with code {process.returncode}: {last}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).json()["status"] == "ok":
                return
        time.sleep(0.25)
    raise BenchError(f"{command} was not ready in five minutes")


def _plain_lines(text: str) -> list[str]:
    """The non-empty lines of a text, without the box-drawing characters around errors about flags."""
    lines = (re.sub(r"[\u2500-\u257f]+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


async def generate(
    url: str,
    conversations: Sequence[Sequence[str]],
    concurrency: int,
    body: Mapping[str, Any],
    done: Callable[[Outcome], None] = lambda _: None,
) -> tuple[float, list[list[Outcome]]]:
    """Run conversations, `concurrency` at a time. Returns seconds, and the outcomes of each one's turns.

    conversations: the user's turns of each; its index is the seed of its requests
    body: fields of every request. Answers are not streamed, which has the least overhead
    done: called after each request

    Raises BenchError if a request fails.
    """
    prompts = [Prompt("all", tuple(turns)) for turns in conversations]
    target = Target(url, body={**body, "stream": False})
    turns = await load.run_conversations(target, prompts, load.Plan(concurrency), done)
    answers = load.raise_on_failure([outcome for outcomes in turns for outcome in outcomes])
    return seconds_of(answers), turns


def new_tokens(answers: Iterable[Outcome]) -> int:
    """Total output tokens of answers."""
    return sum(answer.output_tokens for answer in answers)


def speculation(answers: Sequence[Outcome]) -> dict[str, float]:
    """Accept length (tokens per step, bonus included) and acceptance rate; 1 and 0 without draft tokens."""
    found = metrics.speculation(answers)
    length, rate = (found.accept_length, found.acceptance_rate or 0.0) if found else (1.0, 0.0)
    return {"accept_length": length, "acceptance_rate": rate}
