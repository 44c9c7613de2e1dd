"""Peers that are libraries: each runs in a worker process of a Python that has it, and exchanges JSON lines.

    stdin   {"texts": [...], "new": 128}
    stdout  {"ready": true} once, then {"seconds": 1, "replies": [{"text": "", "tokens": 3, "first": 0, "seconds": 1}]}

Lines that are not JSON objects are output of the library and are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness.errors import BenchError
from bench.harness.processes import running
from bench.peers.base import Peer, PeerInfo, Reply, log_file, log_tail

_SCRIPTS = Path(__file__).parent / "scripts"


class Worker(Peer):
    """A worker script run by a given Python interpreter."""

    def __init__(self, info: PeerInfo, python: str, script: str, arguments: Sequence[str], folder: Path) -> None:
        """script: a file in scripts/. folder: for the log."""
        super().__init__(info)
        self._command = [python, "-u", str(_SCRIPTS / script), *arguments]
        self._log = log_file(folder, info)
        self._child: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the script until the end of the context, once it is ready."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self._log.open("wb") as log, running(self._command, env=environment, stderr=log, **pipes) as child:
            self._child = child
            assert self._read_message().get("ready"), "a worker sends `ready` first"
            yield

    def _read_message(self) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.lstrip().startswith(b"{"):
                message: dict[str, Any] = json.loads(line)
                return message
        raise BenchError(f"{self.info.name} ended with code {self._child.wait()}:\n{log_tail(self._log)}")

    def generate(self, texts: Sequence[str], new: int) -> tuple[float, list[Reply]]:
        """Send texts to the worker and wait for its replies."""
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"texts": list(texts), "new": new}).encode() + b"\n")
        self._child.stdin.flush()
        message = self._read_message()
        return message["seconds"], [Reply(**reply) for reply in message["replies"]]
