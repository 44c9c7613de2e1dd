"""The scheduler: which sessions take part in a step, and with which tokens.

    1. publish   pages that filled up since the last step go to the prefix cache
    2. admit     waiting sessions run while there are admission slots, and pages for all their tokens
    3. attach    a session whose next pages are in the prefix cache takes them instead of computing them
    4. plan      first every running session that only needs its next token, then prompt chunks (portions.py)

If pages run out, cached pages that no session holds are evicted first; then the session that was admitted last, of a
caller with the most running sessions, is preempted: it gives its pages back and waits, but keeps its tokens. Its pages
stay in the cache while there is room. It is also preempted for a caller that has no running session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.errors import EngineFault, Overloaded
from outrider.paging.allocator import OutOfPages, PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.portions import Limits, Portions
from outrider.serving.session import Session
from outrider.serving.waiting import WaitingQueue


@dataclass
class Chunk:
    """Tokens start .. stop - 1 of a session, computed in this step."""

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
    """Owns the sessions of an engine and their pages."""

    def __init__(self, prefix: PrefixCache, limits: Limits) -> None:
        self.prefix = prefix
        self.limits = limits
        self._portions = Portions(limits)
        self.preemptions = 0
        self.held = False  # True: no session is admitted
        self._waiting = WaitingQueue(limits.policy)
        self._running: dict[int, Session] = {}  # in order of admission

    @property
    def allocator(self) -> PageAllocator:
        """The allocator of the pages."""
        return self.prefix.allocator

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __iter__(self) -> Iterator[Session]:
        yield from self._running.values()
        yield from self._waiting

    @property
    def running(self) -> int:
        """Number of running sessions, which hold pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sessions that wait for admission."""
        return len(self._waiting)

    def add(self, session: Session) -> None:
        """Queue a session. Raises Overloaded if the queue is full; sessions that ran before, here or elsewhere, fit."""
        self._waiting.add(session)
        most = self.limits.max_queued
        if most is not None and self.held:  # sessions that free admission slots will take do not count as waiting
            most += self.limits.max_running - len(self._running)
        if most is None or len(self._waiting) <= most or session.begun:
            return
        if not self.held:
            self._admit(displace=False)  # a step may be in flight
        if len(self._waiting) > most and session.id not in self._running:
            self._waiting.remove(session)
            raise Overloaded(f"{len(self._waiting)} requests wait already, which is the limit; retry later")

    def remove(self, session: Session, *, trusted: bool = True) -> None:
        """Remove a session and free its pages. trusted: False keeps its KV out of the prefix cache."""
        if trusted:
            session.publish()
        session.evict(trusted=trusted)
        if self._running.pop(session.id, None) is None:
            self._waiting.remove(session)
        else:
            self._waiting.ended(session)

    def plan(self) -> list[Chunk]:
        """The chunks of this step, with pages leased for their tokens."""
        for session in self._running.values():
            session.publish()
        self._admit()
        prompts: list[Session] = []
        planned: list[tuple[Session, int]] = []
        for session in self._running.values():
            if session.pending > 1:
                session.attach()
            if session.pending > 1:
                prompts.append(session)
            elif session.pending:
                planned.append((session, 1))
        if prompts:
            planned += self._portions.of(prompts, len(planned))
        chunks: list[Chunk] = []
        for session, size in planned:
            if session.id in self._running and self.reserve(session, session.computed + size):
                chunks.append(Chunk(session, session.computed, session.computed + size))
        # A later reservation may have preempted a session that was planned earlier.
        return [chunk for chunk in chunks if chunk.session.id in self._running]

    def fits(self) -> bool:
        """True if there are pages for all pending tokens of running sessions, so that a plan preempts no session."""
        if self._missing(0) > self.allocator.free_pages:
            return False
        return not self._waiting or not self._waiting.next_has_none or self._displaced(self._missing(1)) is None

    def reserve(self, session: Session, tokens: int) -> bool:
        """Lease pages for a session's first tokens, preempting later sessions. False if it was preempted itself."""
        while True:
            try:
                session.table.reserve(tokens)
            except OutOfPages:
                victim = self._victim()
                if victim is session and len(self._running) == 1:
                    raise EngineFault(f"{tokens} tokens do not fit into the whole page pool") from None
                self._preempt(victim)
                self.preemptions += 1
                if victim is session:
                    return False
            else:
                return True

    def reserve_spare(self, session: Session, tokens: int) -> bool:
        """Lease pages for draft tokens, only if they are free: never preempts a session."""
        try:
            session.table.reserve(tokens)
        except OutOfPages:
            return False
        return True

    def check(self) -> None:
        """Audit the allocator and the prefix cache against the sessions' pages. Raises EngineFault."""
        self.allocator.check(tables=[session.table.pages.tolist() for session in self])
        self.prefix.check()

    def _admit(self, *, displace: bool = True) -> None:
        full = len(self._running) >= self.limits.max_running
        if not self._waiting or (full and not (displace and self._waiting.next_has_none)):
            return
        promised = self._missing(1)
        while self._waiting:
            if displace and (victim := self._displaced(promised)) is not None:
                self._preempt(victim)
                self.preemptions += 1
                promised = self._missing(1)
                continue
            session = self._waiting.next()
            if not self._has_room(session, promised):
                return
            self._waiting.take(session)
            self._running[session.id] = session
            session.record.admitted_at = session.record.admitted_at or time.time_ns()
            session.attach()
            promised += self.allocator.pages_for(session.length + 1) - len(session.table.pages)

    def _has_room(self, session: Session, promised: int) -> bool:
        """True if a waiting session can run. promised: pages that running sessions are going to lease."""
        if not self._running:
            return True
        has_slot = len(self._running) < self.limits.max_running
        return has_slot and _wanted(session, self.allocator) + promised <= self.allocator.free_pages

    def _displaced(self, promised: int) -> Session | None:
        """The running session in whose place the next one is admitted, because its caller has none; None if none is.

        The caller of the displaced one keeps another, and the admitted one needs at most an even share of the pages.
        """
        session, running = self._waiting.next(), self._waiting.running
        if session.caller in running or max(running.values(), default=0) < 2 or self._has_room(session, promised):
            return None
        share = self.allocator.total_pages // (len(running) + 1)
        return self._victim() if _wanted(session, self.allocator) <= share else None

    def _missing(self, more: int) -> int:
        """Pages that running sessions lack for their pending tokens. more: further tokens of each session."""
        pages_for = self.allocator.pages_for
        return sum(max(0, pages_for(s.length + more) - len(s.table.pages)) for s in self._running.values())

    def retract(self) -> int:
        """Preempt all running sessions, so that they are computed anew. Returns their number."""
        running = list(self._running.values())
        for session in reversed(running):
            self._preempt(session)
        return len(running)

    def _victim(self) -> Session:
        """The session admitted last, of a caller with the most running sessions. The first one of all is only chosen if
        it is alone, so that every session ends at last."""
        running = self._waiting.running
        most = max(running.values())
        return next(session for session in reversed(self._running.values()) if running[session.caller] == most)

    def _preempt(self, session: Session) -> None:
        del self._running[session.id]
        session.publish()
        session.evict()
        self._waiting.requeue(session)


def _wanted(session: Session, allocator: PageAllocator) -> int:
    """Pages that a waiting session needs besides cached ones that others hold."""
    _, held = session.table.peek(session.sharable)
    return allocator.pages_for(session.length + 1) - held
