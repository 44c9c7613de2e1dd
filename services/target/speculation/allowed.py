"""Which draft sources the open sessions allow, for decisions about a step as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet

from outrider.serving.session import Session
from outrider.speculation.draft_source import SourceKind


class AllowedSources:
    """Counts the open sessions of one engine by what they allow: the draft service, the target's own sources, or both.

    own: draft sources of the target itself
    """

    def __init__(self, own: AbstractSet[SourceKind]) -> None:
        self.own = frozenset(own)
        self._sessions: Counter[tuple[bool, bool]] = Counter()

    def _of(self, session: Session) -> tuple[bool, bool]:
        """Whether a session allows the draft service, and one of the target's own sources."""
        return SourceKind.DRAFT in session.drafting.sources, not self.own.isdisjoint(session.drafting.sources)

    def opened(self, session: Session) -> None:
        """A session begins."""
        self._sessions[self._of(session)] += 1

    def closed(self, session: Session) -> None:
        """A session has ended."""
        self._sessions[self._of(session)] -= 1

    @property
    def service(self) -> bool:
        """True if a session allows the draft service, or none is open."""
        sessions = self._sessions
        return bool(sessions[True, True] or sessions[True, False]) or not sessions.total()

    @property
    def service_alone(self) -> bool:
        """True if sessions allow the draft service, and none of them the sources that the target has of its own."""
        sessions = self._sessions
        return bool(self.own) and bool(sessions[True, False]) and not (sessions[True, True] or sessions[False, True])
