"""Sessions that wait for a place or for pages, and which of them is next.

    fcfs   first come, first served
    lpm    the longest prefix match first: whose pages are in the prefix cache costs little and must not wait until they
           are gone. Nobody is passed over more than a few times.

Of arrivals with different priorities, the policy chooses among those with the lowest number. A session that was
preempted, or goes on from elsewhere, goes before all that have yet to begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from outrider.config import SchedulePolicy
from outrider.serving.session import Session

# A session that so many later ones were admitted before is next.
MAX_PASSED_OVER = 16
# In a longer queue matches are not looked up: it would take longer than it saves.
_MAX_MATCHED = 128


class WaitingQueue:
    """Waiting sessions in order of arrival."""

    def __init__(self, policy: SchedulePolicy = "fcfs") -> None:
        self._policy = policy
        self._returned: deque[Session] = deque()  # preempted, the earliest first; then those from elsewhere
        self._arrived: dict[int, Session] = {}  # by id
        self._passed: dict[int, int] = {}  # by id: later sessions that were admitted before
        self._ranked = 0  # arrivals that have a priority of their own

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    def __iter__(self) -> Iterator[Session]:
        yield from self._returned
        yield from self._arrived.values()

    def add(self, session: Session) -> None:
        """Queue a session. One that has begun elsewhere, or here before, has waited already."""
        if session.begun:
            self._returned.append(session)
            return
        self._arrived[session.id] = session
        self._ranked += session.priority != 0

    def give_back(self, session: Session) -> None:
        """Queue a session that was preempted."""
        self._returned.appendleft(session)

    def remove(self, session: Session) -> None:
        """Forget a session, if it is here."""
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
        """Take the next session out; those that came before it have been passed over, but by none that had its turn."""
        if self._policy == "lpm" and session.id in self._arrived:
            for earlier in self._arrived.values():
                if earlier is session:
                    break
                self._passed[earlier.id] = self._passed.get(earlier.id, 0) + 1
        self.remove(session)
