"""STANDALONE: a small model with the target's vocabulary drafts by itself."""

from __future__ import annotations

from services.draft.drafters.model import ModelDrafter
from services.draft.sessions.prefix_kv import PrefixKV
from services.draft.sessions.session import DraftSession


class StandaloneDrafter(ModelDrafter):
    """Drafts with a model that reads tokens alone."""

    name = "STANDALONE"

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """Move the rows of accepted nodes into the prefix KV; they equal those that prefill would compute."""
        prefix_kv = self.accept(session, count, path)
        return prefix_kv.computed == session.length + count

    def new_prefix_kv(self, session: DraftSession) -> PrefixKV:
        """Row j is token j."""
        return PrefixKV(self.prefix, session.tokens, session.cache_salt)

    def pending(self, session: DraftSession, prefix_kv: PrefixKV) -> int:
        """All committed tokens without a row."""
        return session.length - prefix_kv.computed
