"""Grammars are translated, and compiled for the first time, in another process, which ends if one takes too much.

The translation is Python, whose lock the engine thread needs, and llguidance cannot be interrupted. What can be
compiled there is compiled here as well, where the lock is released.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator

from outrider.errors import EngineFault, InvalidRequest
from outrider.process.python_command import python_command
from outrider.serving.messages import Grammar
from services.target.grammar.source import refusal

log = logging.getLogger(__name__)

SANDBOX_SECONDS = 5.0
"""Processor time that a grammar may take."""

_MODULE = "services.target.grammar.sandbox_process"
_START_SECONDS = 120.0  # for the process to start, on a busy machine
_SLOWEST = 12.0  # seconds for a second of processor time, on a busy machine
_POLL_SECONDS = 0.05  # between two looks at whether the grammar is still wanted


_idle: deque[Sandbox] = deque()  # processes are shared by all engines, and wait here between two grammars


@contextlib.contextmanager
def idle_sandbox() -> Iterator[Sandbox]:
    """A sandbox that no other thread uses."""
    try:
        sandbox = _idle.pop()
    except IndexError:
        sandbox = Sandbox()
    try:
        yield sandbox
    finally:
        _idle.append(sandbox)


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop().close()


class Abandoned(Exception):
    """No session waits for the grammar any more."""


class Sandbox:
    """One process at a time. Used by one thread at a time; starts its process with the first grammar."""

    def __init__(self, seconds: float = SANDBOX_SECONDS) -> None:
        """seconds: of processor time for a grammar."""
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def start(self) -> None:
        """Start the process now, instead of with the first grammar. Raises EngineFault."""
        if self._process is None:
            self._start()

    def translate(self, grammar: Grammar, wanted: Callable[[], bool] = lambda: True) -> str:
        """The grammar in llguidance's format. Raises InvalidRequest, Abandoned, EngineFault.

        wanted: False once no session waits for it any more, which ends the process
        """
        if (process := self._process) is None or process.poll() is not None:
            self.close()
            process = self._start()
        assert process.stdin is not None, "a pipe"
        request = {"kind": int(grammar.kind), "text": grammar.text, "seconds": self._seconds}
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(self._line(process, self._seconds * _SLOWEST, wanted))
        except (OSError, TimeoutError):
            raise refusal(grammar, self._why_it_ended(process)) from None
        except Abandoned:
            self.close()
            raise
        if "error" in answer:
            raise InvalidRequest(answer["error"], param=grammar.kind.param)
        return str(answer["source"])

    def close(self) -> None:
        """End the process; the next grammar starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # unsent bytes of a grammar
                        pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._received = b""
        self._process = process = subprocess.Popen(
            python_command("-m", _MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            self._line(process, _START_SECONDS, lambda: True)
        except (OSError, TimeoutError):
            self.close()
            raise EngineFault("the process that compiles grammars does not start; see the log of the target") from None
        return process

    def _line(self, process: subprocess.Popen[bytes], seconds: float, wanted: Callable[[], bool]) -> bytes:
        """The next line of the process. Raises OSError if the process ended, TimeoutError, Abandoned."""
        assert process.stdout is not None, "a pipe"
        until, poll = time.monotonic() + seconds, select.poll()
        poll.register(process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not wanted():
                raise Abandoned
            if time.monotonic() > until:
                raise TimeoutError
            if not poll.poll(1000 * _POLL_SECONDS):
                continue
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise ConnectionError("the process has ended")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _why_it_ended(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.returncode
        self.close()
        if code in (None, -signal.SIGPROF):
            return f"that takes more than {self._seconds:g} s; make it smaller, or its repetitions"
        log.warning("the process that compiles grammars ended with code %s", code)
        return "that takes too much memory, or is nested too deep; make it smaller, or its repetitions"
