"""SGLang's router, to which slime registers its engines: rollouts by /generate through it must be those without it."""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from checks import URL, check

STARTING = 120  # seconds
PROMPT = [504, 1343, 282, 260, 1123]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 24, "sampling_seed": 7}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def asked(url: str, body: Any = None, method: str | None = None) -> Any:
    """The answer, as JSON where it is."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = answer.read().decode()
    return json.loads(content) if content.startswith(("{", "[")) else content


@contextlib.contextmanager
def router() -> Iterator[str]:
    """URL of the router, which has no worker yet."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port())]
    with open("log", "w") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def until(condition: Any) -> Any:
    """What a condition is once it is true."""
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if found := condition():
                return found
        time.sleep(0.5)
    raise TimeoutError("the router does not get that far")


def rollouts(url: str, **options: Any) -> list[tuple[list[int], list[Any]]]:
    """Tokens and log-probabilities of each answer."""
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING | options, "return_logprob": True}
    answers = asked(f"{url}/generate", body)
    answers = answers if isinstance(answers, list) else [answers]
    return [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in answers]


def workers(url: str) -> list[dict[str, Any]]:
    """Those that the router uses."""
    return [one for one in asked(f"{url}/workers")["workers"] if one["is_healthy"]]


with router() as sglang:

    @check("a worker is registered as slime does it")
    def _():
        until(lambda: asked(f"{sglang}/workers", {"url": URL, "worker_type": "regular"}))
        (worker,) = until(lambda: workers(sglang))
        return ", ".join(f"{name}: {worker[name]}" for name in ("model_id", "worker_type"))

    @check("/generate through it: tokens of a seed, log-probabilities, several answers")
    def _():
        for options in ({}, {"temperature": 0.0}, {"n": 3}):
            (tokens, logprobs), *others = through = rollouts(sglang, **options)
            direct = rollouts(URL, **options)
            assert [one[0] for one in through] == [one[0] for one in direct], options
            pairs = zip(through, direct, strict=True)
            gaps = [abs(a[0] - b[0]) for one, two in pairs for a, b in zip(one[1], two[1], strict=True)]
            assert max(gaps) < 0.1, gaps
            assert (len(tokens), len(logprobs), len(others)) == (24, 24, options.get("n", 1) - 1)
        return rollouts(sglang)[0][0]

    @check("the worker is removed")
    def _():
        (worker,) = workers(sglang)
        asked(f"{sglang}/workers/{worker['id']}", method="DELETE")
        until(lambda: not workers(sglang))
