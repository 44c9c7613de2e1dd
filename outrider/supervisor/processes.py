"""Child processes that are restarted when they end.

start ──► wait for its end ──► code 2 in the first run, or before it was ever ready? ──yes──► give up: everything ends
  ▲                                         │ no
  └───── wait twice as long as last time ───┘        (back to the first wait after a run of 30 s)

A process that does not answer health checks for long is killed, and restarted.

A process can be ready before it finds a wrong configuration: a gateway that meets a draft service of another
vocabulary.

An optional child gives up only for code 2 in its first run, which wrong flags cause; otherwise it is restarted forever.
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
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.process.backoff import Backoff
from outrider.process.parent_death import tied_to_parent
from outrider.supervisor.hangs import until_silent
from outrider.supervisor.health import is_healthy
from outrider.telemetry import LOG_NAME

log = logging.getLogger(__name__)

EXIT_MISCONFIGURED = 2
MAX_FAILED_STARTS = 5
GRACE_SECONDS = 10.0  # for a process to end after SIGTERM
POLL_SECONDS = 0.1
_MAX_LINE_BYTES = 1 << 20  # longer lines are dropped
_ERROR = re.compile(r"(outrider: )?error: ")  # beginning of the line in which a process of Outrider reports its error


@contextlib.asynccontextmanager
async def _output_pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A pipe for a process's output: its reader, and the descriptor of its writing end, which the caller closes.

    With asyncio's own pipes, a process counts as ended only after all processes that hold the pipe have ended.
    """
    reading_end, writing_end = os.pipe()
    output = asyncio.StreamReader(_MAX_LINE_BYTES)
    reading, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading_end, "rb", 0)
    )
    try:
        yield output, writing_end
    finally:
        reading.close()


@dataclass(eq=False)
class Child:
    """A named process that is restarted whenever it ends.

    address: for health checks. on_line: called with every line of its output, without the line end. extra_grace:
    seconds beyond GRACE_SECONDS that it has to end. optional: the others serve without it. on_end: called with the exit
    code and the wait before a restart. token: of the services, which reports progress. reason: why it ended last: the
    error that it reported, else its last line
    silent_seconds: time without an answer to health checks after which it is killed; None for no limit
    """

    name: str
    command: Sequence[str]
    address: str
    on_line: Callable[[str], None]
    backoff: Backoff = field(default_factory=Backoff)
    extra_grace: float = 0.0
    optional: bool = False
    silent_seconds: float | None = None
    on_end: Callable[[int, float], None] = lambda _, __: None
    token: str | None = None
    ready: bool = field(default=False, init=False)
    progress: str = field(default="", init=False)
    gave_up: int | None = field(default=None, init=False)
    reason: str = field(default="", init=False)
    _ending: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        """Id of the running process; None if none runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def keep_alive(self) -> None:
        """Start and restart the process until `end` is called, or until it gives up: `gave_up` is then its exit
        code."""
        waits = self.backoff.waits()
        for attempt in itertools.count(1):
            started = time.monotonic()
            code = await self._run_once()
            if self._ending.is_set():
                return
            if self._gives_up(code, attempt):
                self.gave_up = code
                return
            if time.monotonic() - started >= self.backoff.reset_after:
                waits = self.backoff.waits()
            wait = next(waits)
            log.warning("the %s process ended with code %d, restarting it in %.1f s", self.name, code, wait)
            self.on_end(code, wait)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), wait)
                return

    def _gives_up(self, code: int, attempt: int) -> bool:
        if self.optional:
            return code == EXIT_MISCONFIGURED and attempt == 1
        refused = code == EXIT_MISCONFIGURED and (attempt == 1 or not self.ready)
        return refused or (attempt == MAX_FAILED_STARTS and not self.ready)

    async def wait_ready(self, poll_seconds: float = POLL_SECONDS) -> None:
        """Return once a health check has succeeded. poll_seconds: between two of them."""
        while self.pid is None or not await is_healthy(self.address, on_progress=self._note, token=self.token):  # noqa: ASYNC110 - by polling
            await asyncio.sleep(poll_seconds)
        self.ready = True

    def _note(self, progress: str) -> None:
        self.progress = progress

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the process a signal and do not restart it."""
        self._ending.set()
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _run_once(self) -> int:
        """Run the process from start to end. Returns the exit code, negative for a signal."""
        async with _output_pipe() as (output, writing_end):
            try:
                # In a session of its own, so that Ctrl-C reaches only the supervisor, which stops processes in order.
                self._process = process = await asyncio.create_subprocess_exec(
                    *tied_to_parent(self.command), stdin=asyncio.subprocess.DEVNULL, stdout=writing_end,
                    stderr=asyncio.subprocess.STDOUT, start_new_session=True, env={**os.environ, LOG_NAME: self.name},
                )  # fmt: skip
            finally:
                os.close(writing_end)
            if self._ending.is_set():  # set while the process was starting
                self.end()
            relay = asyncio.create_task(self._relay(output))
            watch = asyncio.create_task(self._kill_if_silent(process))
            try:
                code = await process.wait()
            finally:
                watch.cancel()
            # Its own children may hold the pipe open, so wait only a moment for the end of the output.
            await asyncio.wait([relay], timeout=1.0)
            relay.cancel()
            return code

    async def _kill_if_silent(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process if it hangs, so that it is restarted."""
        if self.silent_seconds is None:
            return
        seconds = await until_silent(self.address, self.silent_seconds)
        log.error("killing the %s process (%d), which has not answered for %.0f s", self.name, process.pid, seconds)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

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
                # After the process's error, libraries may still write lines about the shutdown.
                error = _ERROR.match(line)
                if error is not None or not named:
                    self.reason, named = line[error.end() :] if error else line, error is not None
                with contextlib.suppress(OSError):  # a full disk: drop the line rather than block the child
                    self.on_line(line)


def stop_and_kill_events(on_signal: Callable[[], None] = lambda: None) -> tuple[asyncio.Event, asyncio.Event]:
    """Two events for SIGINT, SIGTERM and SIGHUP: the first signal sets `stop`, a second one `kill`.

    SIGHUP, which a closing terminal sends, stays ignored under `nohup`.

    on_signal: called at each signal
    """
    stop, kill = asyncio.Event(), asyncio.Event()

    def handle() -> None:
        if stop.is_set():
            kill.set()
        stop.set()
        on_signal()

    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        asyncio.get_running_loop().add_signal_handler(number, handle)
    return stop, kill


async def supervise(
    children: Sequence[Child],
    starting: Coroutine[None, None, None],
    stop: asyncio.Event,
    kill: asyncio.Event,
    *,
    together: bool = False,
) -> Child | None:
    """Run children until `stop` is set, or until a child gives up. Returns the child that gave up, or None.

    starting: runs beside them and may return at any time. kill: when set, children that still run are killed.
    together: stop all children at once; by default the last one stops first, then the others.
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
            await _end({child: lives[child] for child in group}, grace, kill)
    for life in lives.values():
        life.result()
    return next((child for child in children if child.gave_up is not None), None)


async def _end(lives: Mapping[Child, asyncio.Task[None]], grace: float, kill: asyncio.Event) -> None:
    """Send children SIGTERM; kill those that run after `grace` seconds, or as soon as `kill` is set."""
    if not lives:
        return
    for child in lives:
        child.end()
    ended = asyncio.create_task(asyncio.wait(lives.values()))
    killing = asyncio.create_task(kill.wait())
    await asyncio.wait([ended, killing], timeout=grace, return_when=asyncio.FIRST_COMPLETED)
    killing.cancel()
    for child in lives:
        if child.pid is not None:
            log.warning("killing the %s process (%d), which did not end after SIGTERM", child.name, child.pid)
            child.end(signal.SIGKILL)
    await ended
