"""smg, a router of production, with the gateway as its gRPC worker: its answers must be ours."""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator

from checks import BIN, GRPC_ADDRESS, MESSAGES, MODEL, URL, check

STARTING = 120  # seconds
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
KINDS = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "seed": 7, "n": 2},
    {"temperature": 0, "stop": ["a"]},
    {"temperature": 0, "response_format": FORMAT},
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def router() -> Iterator[str]:
    """URL of smg, once it knows the worker's model."""
    port = free_port()
    command = [os.path.join(BIN, "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "round_robin"]
    command += ["--worker-urls", f"grpc://{GRPC_ADDRESS}"]
    with open("log", "w") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + STARTING
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    if "content" in chat(url, {"temperature": 0})[0]:
                        break
                time.sleep(1)
            yield url
        finally:
            process.terminate()


def post(url: str, body: dict):
    """An open answer."""
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", data, headers), timeout=60)


def body(options: dict) -> dict:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, **options}


def chat(url: str, options: dict) -> list[dict]:
    """Text and finish reason of each choice."""
    answer = json.load(post(url, body(options)))
    # smg leaves out a character that is not complete when an answer ends; we say that there is one.
    return [
        {"content": choice["message"]["content"].rstrip("\ufffd"), "finish_reason": choice["finish_reason"]}
        for choice in answer["choices"]
    ]


def streamed(url: str) -> str:
    """The same in pieces."""
    lines = [line.decode().strip() for line in post(url, body({"temperature": 0, "stream": True}))]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


with router() as smg:

    @check("chats through it are those without it: greedy, seeds and choices, stop strings, schemas")
    def _():
        for options in KINDS:
            assert chat(smg, options) == chat(URL, options), options
        return repr(chat(smg, KINDS[0])[0]["content"])

    @check("a stream through it is the same text")
    def _():
        text = streamed(smg)
        assert text == streamed(URL) == chat(URL, KINDS[0])[0]["content"]

    @check("models")
    def _():
        models = [model["id"] for model in json.load(urllib.request.urlopen(f"{smg}/v1/models", timeout=30))["data"]]
        assert MODEL in models
        return ", ".join(models)
