"""Processes that live as long as a benchmark needs them, however it ends, and that can be waited for."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.harness.errors import BenchError
from outrider.process.parent_death import tied_to_parent

_SAID = 3  # last lines of a program that failed
_GRACE = 30.0  # seconds until a process that was asked to end is killed


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process that is killed when this one is. options: of Popen. Call it from the main thread."""
    child = subprocess.Popen(tied_to_parent(command), **options)
    child.args = list(command)  # what is told of it if it fails
    return child


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended with the context, its pipes closed. options: of Popen."""
    child = start(command, **options)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(_GRACE)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def output_of(command: Sequence[str], text: str = "") -> str:
    """What a program prints that is given a text. Raises BenchError with what it said last if it fails."""
    ended = subprocess.run(tied_to_parent(command), input=text, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = "\n".join(ended.stderr.splitlines()[-_SAID:])
        raise BenchError(f"{shlex.join(command)} ended with code {ended.returncode}:\n{last}")
    return ended.stdout


def wait_until(
    child: subprocess.Popen[bytes], serves: Callable[[], bool], seconds: float, said: Callable[[], str] = str
) -> None:
    """Wait until a process serves. Raises BenchError with what it said last if it ends, or is not ready in time."""
    end = time.monotonic() + seconds
    while not serves():
        if child.poll() is not None or time.monotonic() > end:
            raise BenchError(f"{child.args!r} does not serve, exit code {child.poll()}:\n{said()}")
        time.sleep(0.1)
