"""STANDALONE: a small model with the target's vocabulary drafts by itself."""

from __future__ import annotations

from services.draft.drafters.model import ModelDrafter
from services.draft.sessions.prefix_kv import Trunk
from services.draft.sessions.session import DraftSession


class StandaloneDrafter(ModelDrafter):
    """Drafts with a model of its own, which reads tokens alone."""

    name = "STANDALONE"

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """Take the rows of accepted nodes over into the trunk; they are what feeding the tokens would give."""
        trunk = self.accept(session, count, path)
        return trunk.computed == session.length + count

    def new_trunk(self, session: DraftSession) -> Trunk:
        """Row j is token j."""
        return Trunk(self.prefix, session.tokens, session.cache_salt)

    def pending(self, session: DraftSession, trunk: Trunk) -> int:
        """All committed tokens that have no row."""
        return session.length - trunk.computed
