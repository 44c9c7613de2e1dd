"""Gateway processes that are forked from one that has imported the gateway, which takes most of a start's CPU time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["gateway.process.app"])


class ForkedGateway:
    """As subprocess.Popen(["python", "-m", "gateway", *argv]), with errors and log in a file."""

    def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        log.write_text("")
        self._process = _FORKS.Process(target=_run, args=(list(argv), str(log), dict(environment)), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end of the process; returns its exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(seconds)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"the gateway {self.pid}", seconds or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


def _run(argv: list[str], log: str, environment: dict[str, str]) -> None:
    """What `python -m gateway` does, in the new process."""
    os.environ.clear()
    os.environ.update(environment)
    to = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(to, 2)
    os.close(to)
    sys.argv = ["gateway", *argv]
    from gateway.process.app import main

    sys.exit(main(argv))
