"""Peers that are libraries: each runs in a process of its own, under the Python that has it, and speaks JSON lines.

    in    {"texts": [...], "new": 128}
    out   {"ready": true} once, then {"seconds": 1, "replies": [{"text": "", "tokens": 3, "first": 0, "seconds": 1}]}

Lines that are no JSON objects are the library's own talk.
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
from bench.peers.base import Facts, Peer, Reply, end_of, log_of

_SCRIPTS = Path(__file__).parent / "scripts"


class Worker(Peer):
    """A script under some Python."""

    def __init__(self, facts: Facts, python: str, script: str, arguments: Sequence[str], folder: Path) -> None:
        """script: in scripts/. folder: for its log."""
        super().__init__(facts)
        self._command = [python, "-u", str(_SCRIPTS / script), *arguments]
        self._log = log_of(folder, facts)
        self._child: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """As of Peer."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self._log.open("wb") as said, running(self._command, env=environment, stderr=said, **pipes) as child:
            self._child = child
            assert self._hear().get("ready"), "a worker is ready before it answers"
            yield

    def _hear(self) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.lstrip().startswith(b"{"):
                heard: dict[str, Any] = json.loads(line)
                return heard
        raise BenchError(f"{self.facts.name} has ended with code {self._child.wait()}:\n{end_of(self._log)}")

    def ask(self, texts: Sequence[str], new: int) -> tuple[float, list[Reply]]:
        """As of Peer."""
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"texts": list(texts), "new": new}).encode() + b"\n")
        self._child.stdin.flush()
        heard = self._hear()
        return heard["seconds"], [Reply(**reply) for reply in heard["replies"]]
