"""Multi-step decoding: several plain steps in one call of a compiled program, as many as the coalescing window holds.

The bookkeeping between two steps of a few milliseconds is considerable. Where a step needs nothing but the tokens of
the one before it, a compiled program goes on by itself: no session has draft tokens, a prompt to read, or asks for more
than tokens. The program returns when a session ends, when a message arrives, or when the window is over. A call leases
the pages for all of its tokens before it begins, so it has as many of a session as a step may have.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.speculation.draft_source import SourceKind
from services.target.sampling.session import TargetSession
from services.target.speculation.budget import TOKENS_PER_SESSION
from services.target.speculation.planner import Planner
from services.target.step.batch import SessionWork
from services.target.step.programs import Interrupts, SessionTexts


def interrupts(entries: Sequence[TargetSession], files: Sequence[int] = ()) -> Interrupts:
    """What ends a program of some sessions early. files: descriptors that become readable when a message arrives."""
    stops = [entry.stops for entry in entries]
    return Interrupts(b"".join(stops), array("q", [len(stop) // 8 for stop in stops]), array("i", files))


def texts(entries: Sequence[TargetSession], room: int, match: int = 0) -> SessionTexts:
    """The sessions' tokens, with room for more. match: as of SessionTexts."""
    sessions = [entry.session for entry in entries]
    addresses = array("q", [session.tokens_with_room(room) for session in sessions])
    return SessionTexts(addresses, array("q", [session.length for session in sessions]), match)


def lookup_texts(entries: Sequence[TargetSession], room: int, match: int) -> SessionTexts | None:
    """The texts of sessions that allow prompt lookup; of the others the address is 0. None if no session does."""
    allowed = [SourceKind.LOOKUP in entry.session.drafting.sources for entry in entries]
    if not match or not any(allowed):
        return None
    found = texts(entries, room, match)
    addresses = array("q", [address if allows else 0 for address, allows in zip(found.addresses, allowed, strict=True)])
    return replace(found, addresses=addresses)


class MultiStepPlanner:
    """Decides how many plain steps follow one another.

    window: seconds in which streamed tokens are coalesced; 0 turns multi-step decoding off
    """

    def __init__(self, planner: Planner, sessions: Mapping[int, TargetSession], window: float) -> None:
        """sessions: those that are open, by id."""
        self._planner = planner
        self._sessions = sessions
        self.window = window

    def alone(self, works: Sequence[SessionWork]) -> bool:
        """True if no other session waits, and each of these wants nothing but its next tokens."""
        sessions = self._sessions
        if not self.window or not works or len(works) != len(sessions):  # one waits for admission, or its grammar
            return False
        if any(len(work.chunk) > 1 or not work.chunk.last for work in works):
            return False
        if any(work.chunk.session.length == work.chunk.session.opened_length for work in works):
            return False  # a first token is sent immediately
        return all(entry.plain for entry in sessions.values())

    def steps(self, works: Sequence[SessionWork]) -> int:
        """How many plain steps of these sessions, which are alone, fit into the window, with pages for their tokens."""
        kv_tokens = sum(work.chunk.stop for work in works)
        seconds, _ = self._planner.budget.cost.step(len(works), kv_tokens)
        sessions = [work.chunk.session for work in works]
        room = min(map(self._planner.room, sessions))
        steps = min(math.ceil(self.window / seconds), room, TOKENS_PER_SESSION)
        return steps if steps > 1 and self._planner.reserve(sessions, steps - 1) else 1
