"""Peers that are servers with OpenAI's chat API: ours, llama.cpp's, vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.harness.errors import BenchError
from bench.harness.processes import running, wait_until
from bench.peers.base import Facts, Peer, Reply, end_of, log_of
from bench.serve.client import Client, Target
from bench.serve.outcome import Outcome
from bench.serve.outrider_system import free_port

_PATIENCE = 600.0  # seconds until a peer serves


class Server(Peer):
    """A server that a command starts."""

    def __init__(
        self, facts: Facts, command: Sequence[str], folder: Path, model: str = "default",
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """command: in which {port} and {spare} stand for ports. folder: for its log. model: its name in requests."""
        super().__init__(facts)
        ports = {"port": str(free_port()), "spare": str(free_port())}
        self._url = f"http://127.0.0.1:{ports['port']}"
        self._command = [word.replace("{port}", ports["port"]).replace("{spare}", ports["spare"]) for word in command]
        self._log = log_of(folder, facts)
        self._model, self._environment = model, environment

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """As of Peer."""
        said = self._log.open("wb")
        with said, running(self._command, env=self._environment, stdout=said, stderr=said) as child:
            with httpx.Client(verify=False) as client:
                wait_until(child, lambda: self._serves(client), _PATIENCE, lambda: end_of(self._log))
            yield

    def _serves(self, client: httpx.Client) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return client.get(f"{self._url}/health", timeout=2).status_code == 200
        return False

    def ask(self, texts: Sequence[str], new: int) -> tuple[float, list[Reply]]:
        """As of Peer."""
        return asyncio.run(self._ask(texts, new))

    async def _ask(self, texts: Sequence[str], new: int) -> tuple[float, list[Reply]]:
        body: dict[str, Any] = {"temperature": 0.0, "max_tokens": new}
        async with Client(Target(self._url, "chat", self._model, body)) as client:
            began = time.perf_counter()
            outcomes = [Outcome("", due=time.perf_counter()) for _ in texts]
            contents = [{"messages": [{"role": "user", "content": text}]} for text in texts]
            await asyncio.gather(*(client.ask(o, c) for o, c in zip(outcomes, contents, strict=True)))
            seconds = time.perf_counter() - began
        return seconds, [self._reply(outcome) for outcome in outcomes]

    def _reply(self, outcome: Outcome) -> Reply:
        if outcome.error:
            raise BenchError(f"{self.facts.name} fails: {outcome.error}, {outcome.detail}")
        return Reply(outcome.text, outcome.output_tokens, outcome.ttft or 0.0, outcome.latency)


def outrider(facts: Facts, flags: Sequence[str], folder: Path) -> Server:
    """Ours, as a user starts it."""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "{port}", "--grpc-port", "{spare}", *flags]
    return Server(facts, command, folder)


def llama_server(facts: Facts, program: str, model: Path, flags: Sequence[str], threads: int, folder: Path) -> Server:
    """llama.cpp's, on a GGUF file."""
    command = [program, "--model", str(model), "--port", "{port}", "--threads", str(threads), "--parallel", "8"]
    return Server(facts, [*command, "--jinja", "--ctx-size", "16384", "--no-webui", *flags], folder)


def vllm(facts: Facts, program: str, model: Path, flags: Sequence[str], threads: int, folder: Path) -> Server:
    """vLLM's, built for CPUs."""
    command = [program, "serve", str(model), "--port", "{port}", "--served-model-name", "default"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "8", *flags]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    return Server(facts, command, folder, environment=environment)
