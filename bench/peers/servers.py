"""Peers that are servers with OpenAI's chat API: Outrider, llama.cpp and vLLM."""

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
from bench.harness.processes import free_port, running, wait_until
from bench.peers.base import Peer, PeerInfo, Reply, log_file, log_tail
from bench.serve.client import Client, Target
from bench.serve.outcome import Outcome

_STARTUP_TIMEOUT = 600.0  # seconds


class Server(Peer):
    """A server that is started by a command."""

    def __init__(
        self, info: PeerInfo, command: Sequence[str], folder: Path, model: str = "default",
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """command: {port} and {spare} in it are replaced by free ports. folder: for the log. model: its name in
        requests.
        """
        super().__init__(info)
        ports = {"port": str(free_port()), "spare": str(free_port())}
        self.url = f"http://127.0.0.1:{ports['port']}"
        self._command = [word.replace("{port}", ports["port"]).replace("{spare}", ports["spare"]) for word in command]
        self._log = log_file(folder, info)
        self._model, self._environment = model, environment

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the command until the end of the context, once /health answers 200."""
        log = self._log.open("wb")
        with log, running(self._command, env=self._environment, stdout=log, stderr=log) as child:
            with httpx.Client(verify=False) as client:
                wait_until(child, lambda: self._healthy(client), _STARTUP_TIMEOUT, lambda: log_tail(self._log))
            yield

    def _healthy(self, client: httpx.Client) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            answer = client.get(f"{self.url}/health", timeout=2)
            return answer.status_code == 200 and b'"degraded"' not in answer.content  # Outrider waits for its draft
        return False

    def generate(self, texts: Sequence[str], new: int) -> tuple[float, list[Reply]]:
        """Send chat requests concurrently."""
        return asyncio.run(self._generate(texts, new))

    async def _generate(self, texts: Sequence[str], new: int) -> tuple[float, list[Reply]]:
        body: dict[str, Any] = {"temperature": 0.0, "max_tokens": new}
        async with Client(Target(self.url, "chat", self._model, body)) as client:
            start = time.perf_counter()
            outcomes = [Outcome("", due=time.perf_counter()) for _ in texts]
            contents = [{"messages": [{"role": "user", "content": text}]} for text in texts]
            await asyncio.gather(*(client.request(o, c) for o, c in zip(outcomes, contents, strict=True)))
            seconds = time.perf_counter() - start
        return seconds, [self._reply(outcome) for outcome in outcomes]

    def _reply(self, outcome: Outcome) -> Reply:
        if outcome.error:
            raise BenchError(f"a request to {self.info.name} failed: {outcome.error}, {outcome.detail}")
        return Reply(outcome.text, outcome.output_tokens, outcome.ttft or 0.0, outcome.latency)


def outrider(info: PeerInfo, flags: Sequence[str], folder: Path) -> Server:
    """`outrider serve`, as a user starts it."""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "{port}", "--grpc-port", "{spare}", *flags]
    return Server(info, command, folder)


def llama_server(info: PeerInfo, program: str, model: Path, flags: Sequence[str], threads: int, folder: Path) -> Server:
    """llama.cpp's server, on a GGUF file."""
    command = [program, "--model", str(model), "--port", "{port}", "--threads", str(threads), "--parallel", "8"]
    return Server(info, [*command, "--jinja", "--ctx-size", "16384", "--no-webui", *flags], folder)


def vllm(info: PeerInfo, program: str, model: Path, flags: Sequence[str], threads: int, folder: Path) -> Server:
    """vLLM's server, built for CPUs."""
    command = [program, "serve", str(model), "--port", "{port}", "--served-model-name", "default"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "8", *flags]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    return Server(info, command, folder, environment=environment)
