"""The sessions that a drafter holds, up to a limit, and those that wait until it has room."""

from __future__ import annotations

import itertools
import logging

import numpy as np
from numpy.typing import NDArray

from outrider.paging.allocator import OutOfPages
from services.draft.drafters.base import Drafter
from services.draft.sessions.session import DraftSession

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 1024  # queue orders of sessions that may be opened again; not all will be


class QueueOrders:
    """The order in which sessions are admitted. A session that is opened again keeps its first order."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._remembered: dict[int, int] = {}  # by id of sessions that will be opened again

    def take(self, session_id: int) -> int:
        """The order of a session that is opened."""
        order = self._remembered.pop(session_id, None)
        return next(self._next) if order is None else order

    def remember(self, session: DraftSession) -> None:
        """Keep the order of a session that will be opened again."""
        self._remembered[session.id] = session.queue_order
        if len(self._remembered) > _MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]


class SessionSlots:
    """The sessions of one drafter. A session is held while there are a slot and pages; otherwise it waits."""

    def __init__(self, drafter: Drafter, index: int, max_held: int) -> None:
        """index: of the drafter's frontier in a session."""
        self.drafter = drafter
        self.index = index
        self.held: dict[int, DraftSession] = {}
        self.waiting: dict[int, DraftSession] = {}  # in ascending queue order
        self._max_held = max_held
        self._blocked = False  # the first waiting session found no pages; retried when pages are released
        # Sessions that released their pages since the last admission, which prefers those that wait behind them.
        self._returned: set[int] = set()

    def __contains__(self, session: DraftSession) -> bool:
        return session.id in self.held or session.id in self.waiting

    def enter(self, session: DraftSession) -> None:
        """Queue a session, unless it is longer than the drafter supports."""
        if not self._too_long(session):
            self._queue(session)

    def _queue(self, session: DraftSession) -> None:
        """Let a session wait before all that were opened later, even if it held a slot before."""
        later = [other for other in self.waiting.values() if other.queue_order > session.queue_order]
        self.waiting[session.id] = session
        for other in later:
            self.waiting[other.id] = self.waiting.pop(other.id)
        if next(iter(self.waiting.values())) is session:
            self._blocked = False  # it was another session that found no pages

    def leave(self, session: DraftSession) -> None:
        """Forget a session and release its pages."""
        self.waiting.pop(session.id, None)
        if self.held.pop(session.id, None) is not None:
            self._release(session)
        self._blocked = False  # pages were released, or the session that found none is gone

    def admit(self) -> list[DraftSession]:
        """Admit waiting sessions while there is room. Returns the admitted ones."""
        admitted: list[DraftSession] = []
        for session in list(self.waiting.values()):
            if self._blocked or len(self.held) >= self._max_held:
                break
            try:
                self.drafter.open(session)
            except OutOfPages:
                if not self.held:  # all pages are free, so this session can never be held
                    log.info(
                        "session %d does not fit into the cache of %s, which does not draft for it",
                        session.id, self.drafter.name,
                    )  # fmt: skip
                    del self.waiting[session.id]
                elif session.id not in self._returned:
                    self._blocked = True
                continue
            self.held[session.id] = self.waiting.pop(session.id)
            session.frontiers[self.index].held = True
            admitted.append(session)
        if self._returned:
            self._returned.clear()
            self._blocked = bool(self.held and self.waiting)
        return admitted

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """As Drafter.will_commit. A session that runs out of pages releases its own, and waits."""
        if session.id not in self.held:
            return False
        try:
            return self.drafter.will_commit(session, count, path)
        except OutOfPages:
            del self.held[session.id]
            self._release(session)
            session.features.give_up()  # rows that were used are needed again
            self._queue(session)
            self._returned.add(session.id)
            self._blocked = False
            return False

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """As Drafter.did_commit. A session that has become too long leaves."""
        if session.id in self.held:
            self.drafter.did_commit(session, kept)
        if session in self and self._too_long(session):
            self.leave(session)

    def finished(self, session: DraftSession, tokens: NDArray[np.uint32]) -> None:
        """As Drafter.finished, if it holds the session."""
        if session.id in self.held:
            self.drafter.finished(session, tokens)

    def _release(self, session: DraftSession) -> None:
        self.drafter.close(session)
        session.frontiers[self.index].held = False
        session.frontiers[self.index].reset()

    def _too_long(self, session: DraftSession) -> bool:
        limit = self.drafter.max_session_tokens
        return limit > 0 and session.length >= limit
