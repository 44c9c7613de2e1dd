"""Which sessions take part in a step, and with which tokens.

First every running session that only needs its next token, then prompt chunks in order of arrival until the step's
token budget is spent. Sessions run while there is a place and pages; when pages run out, the session that arrived last
gives its own back and waits, so that nothing accepted is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.errors import EngineFault
from outrider.paging.allocator import OutOfPages, PageAllocator
from outrider.serving.session import Session


@dataclass
class Chunk:
    """Tokens start .. stop - 1 of a session, to be computed in this step."""

    session: Session
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """True if the chunk reaches the last committed token, so that the next one can be sampled."""
        return self.stop == self.session.length

    def __len__(self) -> int:
        return self.stop - self.start


class Scheduler:
    """Owns the sessions of an engine and the pages that they lease."""

    def __init__(self, allocator: PageAllocator, max_running: int, max_step_tokens: int) -> None:
        """max_running: sessions in a step. max_step_tokens: committed tokens computed in a step, over all sessions."""
        self.allocator = allocator
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.preemptions = 0
        self._waiting: deque[Session] = deque()
        self._running: dict[int, Session] = {}  # in order of admission

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __iter__(self) -> Iterator[Session]:
        yield from self._running.values()
        yield from self._waiting

    @property
    def running(self) -> int:
        """Sessions that hold pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sessions that wait for a place or for pages."""
        return len(self._waiting)

    def add(self, session: Session) -> None:
        """Queue a session."""
        self._waiting.append(session)

    def remove(self, session: Session) -> None:
        """Forget a session and free its pages."""
        session.evict()
        if self._running.pop(session.id, None) is None and session in self._waiting:
            self._waiting.remove(session)

    def plan(self) -> list[Chunk]:
        """Chunks of this step, with pages for their tokens reserved."""
        self._admit()
        decoding = [s for s in self._running.values() if s.pending == 1]
        prefilling = [s for s in self._running.values() if s.pending > 1]
        budget = self.max_step_tokens
        chunks: list[Chunk] = []
        for session in decoding + prefilling:
            size = min(session.pending, budget)
            if size <= 0 or session.id not in self._running:
                continue
            if self.reserve(session, session.computed + size):
                chunks.append(Chunk(session, session.computed, session.computed + size))
                budget -= size
        # A later reservation may have preempted a session that was planned before.
        return [chunk for chunk in chunks if chunk.session.id in self._running]

    def reserve(self, session: Session, tokens: int) -> bool:
        """Lease pages for a session's first tokens, preempting later arrivals. False if it had to go itself."""
        while True:
            try:
                session.table.reserve(tokens)
            except OutOfPages:
                victim = next(reversed(self._running.values()))
                if victim is session and len(self._running) == 1:
                    raise EngineFault(f"{tokens} tokens do not fit into the whole page pool") from None
                self._preempt(victim)
                if victim is session:
                    return False
            else:
                return True

    def reserve_spare(self, session: Session, tokens: int) -> bool:
        """Lease pages for hints: only what is free, never at another session's cost."""
        try:
            session.table.reserve(tokens)
        except OutOfPages:
            return False
        return True

    def check(self) -> None:
        """Audit the pages against what the sessions hold. Raises EngineFault."""
        self.allocator.check(expected_leased=sum(len(s.table.pages) for s in self))

    def _admit(self) -> None:
        promised = 0  # pages for sessions admitted in this step, which have not leased them yet
        while self._waiting and len(self._running) < self.max_running:
            session = self._waiting[0]
            wanted = self.allocator.pages_for(session.length + 1)
            if self._running and wanted + promised > self.allocator.free_pages:
                return
            promised += wanted
            self._running[session.id] = self._waiting.popleft()

    def _preempt(self, session: Session) -> None:
        del self._running[session.id]
        session.evict()
        self._waiting.appendleft(session)
        self.preemptions += 1
