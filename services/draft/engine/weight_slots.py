"""Which sessions a drafter holds, and which wait for it to have room."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from outrider.paging.allocator import OutOfPages
from services.draft.drafters.base import Drafter
from services.draft.sessions.session import DraftSession

log = logging.getLogger(__name__)


class Places:
    """The sessions of one drafter. One is held while there is a place and pages; otherwise it waits for its turn."""

    def __init__(self, drafter: Drafter, index: int, most: int) -> None:
        """index: of the drafter's frontier in a session. most: sessions that are held together."""
        self.drafter = drafter
        self.index = index
        self.held: dict[int, DraftSession] = {}
        self.waiting: dict[int, DraftSession] = {}
        self._most = most
        self._blocked = False  # the first waiting session found no pages; try again when some come home
        # Those that gave their pages back since the last admission: it passes over them, for those that wait behind.
        self._returned: set[int] = set()

    def __contains__(self, session: DraftSession) -> bool:
        return session.id in self.held or session.id in self.waiting

    def enter(self, session: DraftSession) -> None:
        """Queue a session, unless it is longer than the drafter can follow."""
        if not self._too_long(session):
            self._queue(session)

    def _queue(self, session: DraftSession) -> None:
        """Let a session wait before all those that came later, also if it has had a place before."""
        later = [other for other in self.waiting.values() if other.turn > session.turn]
        self.waiting[session.id] = session
        for other in later:
            self.waiting[other.id] = self.waiting.pop(other.id)
        if next(iter(self.waiting.values())) is session:
            self._blocked = False  # another one was

    def leave(self, session: DraftSession) -> None:
        """Forget a session and free what it holds."""
        self.waiting.pop(session.id, None)
        if self.held.pop(session.id, None) is not None:
            self._release(session)
        self._blocked = False  # there may be pages now, or it was the one that found none

    def admit(self) -> list[DraftSession]:
        """Hold waiting sessions as long as there is room. Returns those that are held now."""
        admitted: list[DraftSession] = []
        for session in list(self.waiting.values()):
            if self._blocked or len(self.held) >= self._most:
                break
            try:
                self.drafter.open(session)
            except OutOfPages:
                if not self.held:  # pages come home when a session ends; if none runs, this one can never be held
                    log.info(
                        "session %d does not fit into the cache of %s, which leaves it out",
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
        """As the drafter's. If its pages run out, the session gives back what it has and waits."""
        if session.id not in self.held:
            return False
        try:
            return self.drafter.will_commit(session, count, path)
        except OutOfPages:
            del self.held[session.id]
            self._release(session)
            session.features.give_up()  # those that were used are gone
            self._queue(session)
            self._returned.add(session.id)
            self._blocked = False
            return False

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """As the drafter's. A session that has become too long leaves."""
        if session.id in self.held:
            self.drafter.did_commit(session, kept)
        if session in self and self._too_long(session):
            self.leave(session)

    def ended(self, session: DraftSession, tokens: NDArray[np.uint32]) -> None:
        """As the drafter's, if it holds the session."""
        if session.id in self.held:
            self.drafter.ended(session, tokens)

    def _release(self, session: DraftSession) -> None:
        self.drafter.close(session)
        session.frontiers[self.index].held = False
        session.frontiers[self.index].reset()

    def _too_long(self, session: DraftSession) -> bool:
        limit = self.drafter.max_session_tokens
        return limit > 0 and session.length >= limit
