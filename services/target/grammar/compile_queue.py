"""Grammars that wait to be compiled, and the threads that compile them.

Callers take turns, and a bounded number of a caller's grammars wait. Two threads compile; a caller that has none of
them gets another one, so that a caller with a thousand grammars does not delay the others. A grammar that no session
waits for is not compiled, or no longer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from llguidance import LLMatcher

from outrider.errors import Overloaded
from outrider.serving.messages import Grammar
from services.target.grammar.sandbox import Abandoned

MAX_WAITING = 256
"""Grammars of a caller that may wait."""

_THREADS = 2
_MOST_THREADS = 8  # with those of callers that have none of the first
_IDLE_SECONDS = 10.0  # after which a thread ends
_RETRY_SECONDS = 2

Compile = Callable[[Grammar, Callable[[], bool]], LLMatcher]
"""Compiles a grammar for as long as the function returns True. Raises OutriderError, Abandoned."""


@dataclass(eq=False)
class Job:
    """A grammar to compile.

    sessions: those that wait for it. begun: a thread has it. future: cancelled if no session waits any more
    """

    grammar: Grammar
    sessions: set[int] = field(default_factory=set)
    begun: bool = False
    future: Future[LLMatcher] = field(default_factory=Future)


class CompileQueue:
    """Compiles grammars, in turns by caller, in threads that start when there are some."""

    def __init__(self, compile_now: Compile) -> None:
        self._compile = compile_now
        self._changed = threading.Condition(threading.RLock())
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by caller, the next turn first
        self._running: list[str] = []  # callers whose grammars are being compiled
        self._threads = 0

    def add(self, job: Job, caller: str, *, bounded: bool = True) -> None:
        """Compile a job in a caller's turn, too. Raises Overloaded if it is bounded and too many wait."""
        with self._changed:
            jobs = self._waiting.setdefault(caller, deque())
            if job in jobs:
                return
            if bounded and len(jobs) >= MAX_WAITING:
                self._drop_unwanted(jobs)
            if bounded and len(jobs) >= MAX_WAITING:
                raise Overloaded(
                    f"{len(jobs)} grammars of this caller wait to be compiled, which is the limit; retry later",
                    retry_after=_RETRY_SECONDS,
                )
            jobs.append(job)
            idle = self._threads - len(self._running)
            if self._threads < _THREADS or (not idle and self._threads < _MOST_THREADS and caller not in self._running):
                self._threads += 1
                threading.Thread(target=self._work, name="grammar", daemon=True).start()
            self._changed.notify()

    def join(self, job: Job, session_id: int) -> bool:
        """Let a session wait for a job. False if the job was given up, so that another one is needed."""
        with self._changed:
            if job.future.cancelled():
                return False
            job.sessions.add(session_id)
            return True

    def leave(self, job: Job, session_id: int) -> None:
        """A session no longer waits for a job."""
        with self._changed:
            job.sessions.discard(session_id)

    def wanted(self, job: Job) -> bool:
        """True if a session waits for the job; otherwise it is cancelled, unless it is done. Any thread may call."""
        with self._changed:
            return bool(job.sessions) or not job.future.cancel()

    def _drop_unwanted(self, jobs: deque[Job]) -> None:
        wanted = [job for job in jobs if self.wanted(job)]
        jobs.clear()
        jobs.extend(wanted)

    # --- in the threads ---

    def _work(self) -> None:
        while True:
            with self._changed:
                while (turn := self._next()) is None:
                    if not self._changed.wait(_IDLE_SECONDS) and not self._waiting:
                        self._threads -= 1
                        return
                caller, job = turn
                self._running.append(caller)
            try:
                self._run(job)
            finally:
                with self._changed:
                    self._running.remove(caller)
                    self._changed.notify_all()

    def _next(self) -> tuple[str, Job] | None:
        """The next job and its caller, which goes behind the others."""
        for caller in sorted(self._waiting, key=self._running.count):
            if caller in self._running and len(self._running) >= _THREADS:
                continue
            jobs = self._waiting.pop(caller)
            job = jobs.popleft()
            if jobs:
                self._waiting[caller] = jobs
            return caller, job
        return None

    def _run(self, job: Job) -> None:
        """Compile a job, unless no session waits for it or another thread has it: two callers may want it."""
        with self._changed:
            if job.begun or not self.wanted(job):
                return
            job.begun = True
        try:
            found = self._compile(job.grammar, lambda: self.wanted(job))
        except Abandoned:
            return
        except BaseException as error:  # a bug that one grammar triggers must not end the thread
            with self._changed:
                if not job.future.cancelled():
                    job.future.set_exception(error)
        else:
            with self._changed:
                if not job.future.cancelled():
                    job.future.set_result(found)
