"""Child processes that are kept alive.

start ──► wait for its end ──► code 2 in its first life, or before it ever was ready? ──yes──► refused: everything ends
  ▲                                         │ no
  └───────── wait, twice as long as before ─┘        (the first wait again after a life of 30 s)

A process may be ready before it knows that it cannot go on, as a gateway is that meets a draft of another vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.process.leash import leashed
from outrider.supervisor.health import is_healthy

log = logging.getLogger(__name__)

EXIT_MISCONFIGURED = 2
MAX_FAILED_STARTS = 5
GRACE_SECONDS = 10.0  # for a process to end by itself
POLL_SECONDS = 0.1
_LONGEST_LINE = 1 << 20  # bytes; longer ones are dropped
_ERROR = re.compile(r"(outrider: )?error: ")  # how processes of ours begin the line that says why they end


@dataclass(frozen=True)
class Backoff:
    """Waits between restarts, in seconds."""

    first: float = 0.5
    longest: float = 10.0
    reset_after: float = 30.0

    def waits(self) -> Iterator[float]:
        """Each twice the one before, up to the longest."""
        wait = self.first
        while True:
            yield wait
            wait = min(2 * wait, self.longest)


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A pipe for what a process writes: where to read it, and the descriptor to write to, which the caller closes.

    With a pipe that asyncio makes, a process has not ended for it before all have who hold that pipe.
    """
    end, entrance = os.pipe()
    output = asyncio.StreamReader(_LONGEST_LINE)
    reading, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(end, "rb", 0)
    )
    try:
        yield output, entrance
    finally:
        reading.close()


@dataclass(eq=False)
class Child:
    """One process by name, started again whenever it dies.

    address: where its health is asked. on_line: called with every line that it writes, without the line's end.
    extra_grace: seconds that it gets to end by itself beyond those of all. reason: why its last life ended, in its own
    words: the error that it named, or else its last line
    """

    name: str
    command: Sequence[str]
    address: str
    on_line: Callable[[str], None]
    backoff: Backoff = field(default_factory=Backoff)
    extra_grace: float = 0.0
    ready: bool = field(default=False, init=False)
    progress: str = field(default="", init=False)
    gave_up: int | None = field(default=None, init=False)
    reason: str = field(default="", init=False)
    _ending: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        """Id of the process that runs at present."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def keep_alive(self) -> None:
        """Start it, again and again, until it is told to end, or gives up: `gave_up` then is its exit code."""
        waits = self.backoff.waits()
        for life in itertools.count(1):
            started = time.monotonic()
            code = await self._live()
            if self._ending.is_set():
                return
            refused = code == EXIT_MISCONFIGURED and (life == 1 or not self.ready)
            if refused or (life == MAX_FAILED_STARTS and not self.ready):
                self.gave_up = code
                return
            if time.monotonic() - started >= self.backoff.reset_after:
                waits = self.backoff.waits()
            wait = next(waits)
            log.warning("the %s process ended with code %d; it starts again in %.1f s", self.name, code, wait)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), wait)
                return

    async def wait_ready(self) -> None:
        """Return once its health was good."""
        while self.pid is None or not await is_healthy(self.address, tell=self._note):  # noqa: ASYNC110 - it does not call
            await asyncio.sleep(POLL_SECONDS)
        self.ready = True

    def _note(self, progress: str) -> None:
        self.progress = progress

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal; it is not started again."""
        self._ending.set()
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _live(self) -> int:
        """One life, from start to end. Returns the exit code, negative for a signal."""
        async with _pipe() as (output, entrance):
            try:
                # A session of its own, so that Ctrl-C reaches the supervisor alone, which ends the processes in order.
                self._process = process = await asyncio.create_subprocess_exec(
                    *leashed(self.command), stdin=asyncio.subprocess.DEVNULL, stdout=entrance,
                    stderr=asyncio.subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(entrance)
            if self._ending.is_set():  # while it was being started
                self.end()
            relay = asyncio.create_task(self._relay(output))
            code = await process.wait()
            # What it started may hold the pipe open, so the pipe's end is waited for a moment only.
            await asyncio.wait([relay], timeout=1.0)
            relay.cancel()
            return code

    async def _relay(self, output: asyncio.StreamReader) -> None:
        named = False
        while True:
            try:
                raw = await output.readline()
            except ValueError:
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if line:
                # Behind its error, libraries may still complain of the end that it brings.
                error = _ERROR.match(line)
                if error is not None or not named:
                    self.reason, named = line[error.end() :] if error else line, error is not None
                with contextlib.suppress(OSError):  # a full disk: the line is lost, the child need not wait for ever
                    self.on_line(line)


def stop_and_hurry(tell: Callable[[], None] = lambda: None) -> tuple[asyncio.Event, asyncio.Event]:
    """What SIGINT, SIGTERM and SIGHUP set: the first one an event to stop, a second one another to hurry.

    SIGHUP, as a terminal sends that is closed, is ignored where it was before, by `nohup`.

    tell: called each time
    """
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()
        tell()

    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop, hurry


async def supervise(
    children: Sequence[Child],
    starting: Coroutine[None, None, None],
    stop: asyncio.Event,
    hurry: asyncio.Event,
    *,
    together: bool = False,
) -> Child | None:
    """Run children until `stop`, or until one gives up, which is then returned.

    starting: runs beside them and may return at any time. hurry: kills what does not end at once. The last child is
    ended first, then the others together; or all together.
    """
    lives = {child: asyncio.create_task(child.keep_alive()) for child in children}
    start = asyncio.create_task(starting)
    stopping = asyncio.create_task(stop.wait())
    until = {stopping, *lives.values()}
    try:
        await asyncio.wait({start, *until}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
    finally:
        start.cancel()
        stopping.cancel()
        for group in (children,) if together else (children[-1:], children[:-1]):
            grace = GRACE_SECONDS + max((child.extra_grace for child in group), default=0.0)
            await _end({child: lives[child] for child in group}, grace, hurry)
    for life in lives.values():
        life.result()
    return next((child for child in children if child.gave_up is not None), None)


async def _end(lives: Mapping[Child, asyncio.Task[None]], grace: float, hurry: asyncio.Event) -> None:
    """Ask children to end; kill what is left after `grace` seconds, or as soon as `hurry` is set."""
    if not lives:
        return
    for child in lives:
        child.end()
    ended = asyncio.create_task(asyncio.wait(lives.values()))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait([ended, hurried], timeout=grace, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    for child in lives:
        if child.pid is not None:
            log.warning("the %s process (%d) did not end when it was asked to; it is killed", child.name, child.pid)
            child.end(signal.SIGKILL)
    await ended
