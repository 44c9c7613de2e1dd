"""The span of a session on the draft, made when it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.tracing import Tracing
from services.draft.sessions.session import DraftSession


def tell(tracing: Tracing, session: DraftSession, drafters: Sequence[str]) -> None:
    """Say how long a session was drafted for. drafters: names of those at work."""
    attributes = {
        "outrider.session_id": str(session.id),
        "outrider.drafters": list(drafters),
        "gen_ai.usage.input_tokens": session.prompt_length,
        "outrider.followed_tokens": session.length - session.opened_length,
    }
    tracing.add("draft", session.traceparent, session.opened_at, time.time_ns(), attributes)
