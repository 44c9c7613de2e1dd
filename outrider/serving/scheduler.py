"""The scheduler: which sessions take part in a step, and with which tokens.

    1. publish   pages that filled up since the last step go to the prefix cache
    2. admit     waiting sessions run while there are admission slots, and pages for all their tokens
    3. attach    a session whose next pages are in the prefix cache takes them instead of computing them
    4. plan      first every running session that only needs its next token, then prompt chunks, within limits

If pages run out, cached pages that no session holds are evicted first; then the session that was admitted last is
preempted: it gives its pages back and waits, but keeps its tokens. Its pages stay in the cache while there is room.

The prompt that has waited longest gets at least half of a step's tokens for prompts; the rest goes to the shortest
prompts. So a long prompt does not delay short ones, and they do not starve it. Of several sessions with the same next
page, one computes it and the others take it one step later.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from outrider.config import SchedulePolicy
from outrider.errors import EngineFault, Overloaded
from outrider.paging.allocator import OutOfPages, PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.session import Session
from outrider.serving.waiting import WaitingQueue

_SCORED_PARTS = 4  # a step with log-probabilities of prompts takes several times as long as others; see _few_scored


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


@dataclass(frozen=True)
class Limits:
    """Limits of a step, and of the queue of waiting sessions.

    max_running: sessions in a step. step_tokens: committed tokens computed in a step, over all sessions; None computes
    every prompt in one step. prefill_tokens: prompt tokens among them; a whole prompt may be longer if it is alone.
    max_queued: waiting sessions; None for no limit. scored_tokens: prompt tokens with log-probabilities, whose logits
    take much memory.
    """

    max_running: int
    step_tokens: int | None
    prefill_tokens: int | None = None
    max_queued: int | None = None
    policy: SchedulePolicy = "fcfs"
    scored_tokens: int | None = None


class Scheduler:
    """Owns the sessions of an engine and their pages."""

    def __init__(self, prefix: PrefixCache, limits: Limits) -> None:
        self.prefix = prefix
        self.limits = limits
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
            self._admit()
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
            planned += self._few_scored(self._portions(prompts, len(planned)), len(planned))
        chunks: list[Chunk] = []
        for session, size in planned:
            if session.id in self._running and self.reserve(session, session.computed + size):
                chunks.append(Chunk(session, session.computed, session.computed + size))
        # A later reservation may have preempted a session that was planned earlier.
        return [chunk for chunk in chunks if chunk.session.id in self._running]

    def fits(self) -> bool:
        """True if there are pages for all pending tokens of running sessions, so that a plan preempts no session."""
        return self._missing(0) <= self.allocator.free_pages

    def reserve(self, session: Session, tokens: int) -> bool:
        """Lease pages for a session's first tokens, preempting later sessions. False if it was preempted itself."""
        while True:
            try:
                session.table.reserve(tokens)
            except OutOfPages:
                victim = next(reversed(self._running.values()))
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

    def _admit(self) -> None:
        if not self._waiting or len(self._running) >= self.limits.max_running:
            return
        pages_for = self.allocator.pages_for
        promised = self._missing(1)
        while self._waiting and len(self._running) < self.limits.max_running:
            session = self._waiting.next()
            _, held = session.table.peek(session.sharable)
            wanted = pages_for(session.length + 1) - held
            if self._running and wanted + promised > self.allocator.free_pages:
                return
            self._waiting.take(session)
            self._running[session.id] = session
            session.admitted_at = session.admitted_at or time.time_ns()
            session.attach()
            promised += pages_for(session.length + 1) - len(session.table.pages)

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

    def _preempt(self, session: Session) -> None:
        del self._running[session.id]
        session.publish()
        session.evict()
        self._waiting.requeue(session)

    # --- prompts ---

    def _portions(self, prompts: Sequence[Session], decoding: int) -> list[tuple[Session, int]]:
        """Tokens of each prompt in this step. prompts: in order of admission. decoding: tokens of other sessions."""
        oldest, *others = prompts
        order = _first_of_each_page([oldest, *sorted(others, key=lambda session: session.pending)])
        if self.limits.step_tokens is None:
            return self._whole(order)
        room = self.limits.step_tokens - decoding
        if self.limits.prefill_tokens is not None:
            room = min(room, self.limits.prefill_tokens)
        rest = sum(session.pending for session in order[1:])
        portions: list[tuple[Session, int]] = []
        for session in order:
            size = min(session.pending, room if portions else max((room + 1) // 2, room - rest))
            if size <= 0:
                break
            portions.append((session, size))
            room -= size
        return portions

    def _few_scored(self, portions: Sequence[tuple[Session, int]], decoding: int) -> Iterator[tuple[Session, int]]:
        """Limit the portions of prompts with log-probabilities, more so while other sessions decode."""
        room = self.limits.scored_tokens
        if room is not None and decoding:
            room = max(1, room // _SCORED_PARTS)
        for session, size in portions:
            if room is None or session.scored == session.to_score:
                yield session, size
            elif room > 0:
                yield session, min(size, room)
                room -= min(size, room)

    def _whole(self, order: Sequence[Session]) -> list[tuple[Session, int]]:
        """As many whole prompts as fit, but at least the first."""
        room = self.limits.prefill_tokens
        portions: list[tuple[Session, int]] = []
        for session in order:
            if room is not None:
                if portions and session.pending > room:
                    break
                room -= session.pending
            portions.append((session, session.pending))
        return portions


def _first_of_each_page(order: Sequence[Session]) -> list[Session]:
    """Sessions in this order, without those whose next page an earlier one computes in this step."""
    keys: set[Hashable] = set()
    first: list[Session] = []
    for session in order:
        own = session.table.next_key(session.tokens)
        aligned = session.computed == session.table.shared * session.table.page_size
        takes = aligned and session.table.next_key(session.sharable) is not None
        if not (takes and own in keys):
            first.append(session)
            if own is not None:
                keys.add(own)
    return first
