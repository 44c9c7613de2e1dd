"""The queue of sessions that wait for admission.

    fcfs   first come, first served
    lpm    longest prefix match first: cached pages make a session cheap, and may be evicted while it waits; a session
           is passed over at most MAX_PASSED_OVER times

The policy chooses among the sessions with the lowest priority number. While an earlier arrival with a higher number
waits, every ninth admission is that of the earliest arrival, whatever its number, so that none waits for ever. Sessions
that were preempted, or that continue from another target, are admitted before all sessions that have not run yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from outrider.config import SchedulePolicy
from outrider.serving.session import Session

# Number of later sessions that may be admitted before a session.
MAX_PASSED_OVER = 16
# Sessions with lower priority numbers that may be admitted one after the other before the earliest arrival.
MAX_PREFERRED = 8
# Queue length above which prefix matches are not looked up, because the lookup takes longer than it saves.
_MAX_MATCHED = 128


class WaitingQueue:
    """Waiting sessions in order of arrival."""

    def __init__(self, policy: SchedulePolicy = "fcfs") -> None:
        self._policy = policy
        self._returned: deque[Session] = deque()  # preempted ones, the earliest first; then those from other targets
        self._arrived: dict[int, Session] = {}  # by id
        self._passed: dict[int, int] = {}  # by id: number of later sessions that were admitted before
        self._ranked = 0  # arrivals with a priority other than 0
        self._preferred = 0  # sessions admitted one after the other before the earliest arrival, for their priority

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    def __iter__(self) -> Iterator[Session]:
        yield from self._returned
        yield from self._arrived.values()

    def add(self, session: Session) -> None:
        """Queue a session. A session that ran before, here or elsewhere, goes before those that did not."""
        if session.begun:
            self._returned.append(session)
            return
        self._arrived[session.id] = session
        self._ranked += session.priority != 0

    def requeue(self, session: Session) -> None:
        """Queue a session that was preempted."""
        self._returned.appendleft(session)

    def remove(self, session: Session) -> None:
        """Remove a session, if it is in the queue."""
        if self._arrived.get(session.id) is session:
            del self._arrived[session.id]
            self._passed.pop(session.id, None)
            self._ranked -= session.priority != 0
        elif session in self._returned:
            self._returned.remove(session)

    def next(self) -> Session:
        """The session to admit next. The queue must not be empty."""
        if self._returned:
            return self._returned[0]
        arrived: Iterable[Session] = self._arrived.values()
        if self._ranked:
            if self._preferred >= MAX_PREFERRED:
                return next(iter(arrived))
            lowest = min(session.priority for session in arrived)
            arrived = [session for session in arrived if session.priority == lowest]
        first = next(iter(arrived))
        if (
            self._policy == "fcfs"
            or len(self._arrived) > _MAX_MATCHED
            or self._passed.get(first.id, 0) >= MAX_PASSED_OVER
        ):
            return first
        return max(arrived, key=lambda session: session.table.peek(session.sharable)[0])

    def take(self, session: Session) -> None:
        """Remove the next session, and count it as passing over the earlier arrivals."""
        if session.id in self._arrived:
            earliest = next(iter(self._arrived.values()))
            self._preferred = self._preferred + 1 if session.priority < earliest.priority else 0
        if self._policy == "lpm" and session.id in self._arrived:
            for earlier in self._arrived.values():
                if earlier is session:
                    break
                self._passed[earlier.id] = self._passed.get(earlier.id, 0) + 1
        self.remove(session)
