"""The queue of sessions that wait for admission.

The caller with the fewest running sessions is next; callers with equally many take turns. Of its sessions, those that
were preempted, or that continue from another target, are admitted before all that have not run yet. A policy chooses
among the latter:

    fcfs   first come, first served
    lpm    longest prefix match first: cached pages make a session cheap, and may be evicted while it waits; a session
           is passed over at most MAX_PASSED_OVER times

Sessions with a lower priority number go first, of any caller. While the turn of a caller is passed over for
that reason, every ninth admission is that of its earliest arrival, whatever its number, so that none waits for ever.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from outrider.config import SchedulePolicy
from outrider.serving.session import Session

# Number of later sessions of a caller that may be admitted before a session.
MAX_PASSED_OVER = 16
# Sessions with lower priority numbers that may be admitted one after the other before the earliest arrival.
MAX_PREFERRED = 8
# Queue length above which prefix matches are not looked up, because the lookup takes longer than it saves.
_MAX_MATCHED = 128


@dataclass
class _Line:
    """Waiting sessions of one caller, in order of arrival. returned: preempted ones, the earliest first; then those
    from other targets. passed: by id, the number of later sessions that were admitted before"""

    returned: deque[Session] = field(default_factory=deque)
    arrived: dict[int, Session] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.returned or self.arrived)


class WaitingQueue:
    """Waiting sessions. running: number of admitted sessions by caller, without zeros."""

    def __init__(self, policy: SchedulePolicy = "fcfs") -> None:
        self.running = Counter[str]()
        self._policy = policy
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # by caller, the next turn first; none is empty
        self._ranked = 0  # arrivals with a priority other than 0
        self._preferred = 0  # admissions one after the other that passed over a turn for their priority

    def __len__(self) -> int:
        return sum(len(line.returned) + len(line.arrived) for line in self._lines.values())

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Session]:
        for line in self._lines.values():
            yield from line.returned
        for line in self._lines.values():
            yield from line.arrived.values()

    def add(self, session: Session) -> None:
        """Queue a session. A session that ran before, here or elsewhere, goes before those that did not."""
        line = self._lines.setdefault(session.caller, _Line())
        if session.begun:
            line.returned.append(session)
            return
        line.arrived[session.id] = session
        self._ranked += session.priority != 0

    def requeue(self, session: Session) -> None:
        """Queue an admitted session that was preempted."""
        self.ended(session)
        self._lines.setdefault(session.caller, _Line()).returned.appendleft(session)

    def ended(self, session: Session) -> None:
        """An admitted session runs no longer."""
        self.running[session.caller] -= 1
        if not self.running[session.caller]:
            del self.running[session.caller]

    def remove(self, session: Session) -> None:
        """Remove a session, if it is in the queue."""
        line = self._lines.get(session.caller)
        if line is None:
            return
        if line.arrived.get(session.id) is session:
            del line.arrived[session.id]
            line.passed.pop(session.id, None)
            self._ranked -= session.priority != 0
        elif session in line.returned:
            line.returned.remove(session)
        if not line:
            del self._lines[session.caller]

    def next(self) -> Session:
        """The session to admit next. The queue must not be empty."""
        if not self._ranked or self._preferred >= MAX_PREFERRED:
            return self._first(self._turn(self._lines))
        lowest = min(session.priority for line in self._lines.values() for session in line.arrived.values())
        lines = {
            caller: line
            for caller, line in self._lines.items()
            if line.returned or any(session.priority == lowest for session in line.arrived.values())
        }
        return self._first(self._turn(lines), lowest)

    @property
    def next_has_none(self) -> bool:
        """True if the caller of the next session has no running one. The queue must not be empty."""
        return self.next().caller not in self.running

    def take(self, session: Session) -> None:
        """Admit the next session, and count it as passing over others."""
        line = self._lines[session.caller]
        if session.id in line.arrived:
            if self._ranked:
                fair = self._turn(self._lines)
                earliest = next(iter(fair.arrived.values()), session)
                self._preferred = self._preferred + 1 if session.priority < earliest.priority else 0
            if self._policy == "lpm":
                for earlier in line.arrived.values():
                    if earlier is session:
                        break
                    line.passed[earlier.id] = line.passed.get(earlier.id, 0) + 1
        self.remove(session)
        self.running[session.caller] += 1
        if session.caller in self._lines:
            self._lines.move_to_end(session.caller)

    def _turn(self, lines: Iterable[str]) -> _Line:
        """The line of the caller whose turn it is among some."""
        return self._lines[
            min(lines, key=lambda caller: (self.running.get(caller, 0), not self._lines[caller].returned))
        ]

    def _first(self, line: _Line, lowest: int | None = None) -> Session:
        """A line's next session. lowest: priority of arrivals that may be chosen; None for the earliest of any."""
        if line.returned:
            return line.returned[0]
        arrived: Iterable[Session] = line.arrived.values()
        if lowest is not None:
            arrived = [session for session in arrived if session.priority == lowest]
        first = next(iter(arrived))
        if (
            self._policy == "fcfs"
            or (lowest is None and self._ranked)
            or len(line.arrived) > _MAX_MATCHED
            or line.passed.get(first.id, 0) >= MAX_PASSED_OVER
        ):
            return first
        return max(arrived, key=lambda session: session.table.peek(session.sharable)[0])
