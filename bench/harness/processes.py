"""Child processes of a benchmark. The kernel ends each of them with the benchmark, even when that is killed."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.harness.errors import BenchError
from outrider.process.parent_death import tied_to_parent
from outrider.process.ports import free_ports

_LAST_LINES = 3  # of a failed program's stderr, quoted in the error
_TERMINATION_TIMEOUT = 30.0  # seconds from SIGTERM to SIGKILL


def free_port() -> int:
    """A TCP port of the loopback interface that no process uses at the moment."""
    return free_ports("127.0.0.1", 1)[0]


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that ends when this process ends. options: of Popen. Call from the main thread."""
    child = subprocess.Popen(tied_to_parent(command), **options)
    child.args = list(command)  # error messages show the command without the wrapper
    return child


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives as long as the context; its pipes are closed at the end. options: of Popen."""
    child = start(command, **options)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(_TERMINATION_TIMEOUT)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(_TERMINATION_TIMEOUT)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def output_of(command: Sequence[str], text: str = "") -> str:
    """Run a program with `text` as its stdin. Returns its stdout.

    Raises BenchError with the last lines of its stderr if it fails.
    """
    ended = subprocess.run(tied_to_parent(command), input=text, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = "\n".join(ended.stderr.splitlines()[-_LAST_LINES:])
        raise BenchError(f"{shlex.join(command)} ended with code {ended.returncode}:\n{last}")
    return ended.stdout


def wait_until(
    child: subprocess.Popen[bytes], ready: Callable[[], bool], seconds: float, log: Callable[[], str] = str
) -> None:
    """Poll `ready` every 0.1 s until it is true.

    Raises BenchError with the text of `log` if the process ends first, or is not ready after `seconds`.
    """
    end = time.monotonic() + seconds
    while not ready():
        if child.poll() is not None or time.monotonic() > end:
            raise BenchError(f"{child.args!r} does not serve, exit code {child.poll()}:\n{log()}")
        time.sleep(0.1)
