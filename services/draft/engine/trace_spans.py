"""The trace span of a session in the draft service, recorded when the session ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.tracing import Tracing
from services.draft.sessions.session import DraftSession


def record(tracing: Tracing, session: DraftSession, drafters: Sequence[str]) -> None:
    """Record the span of a session that ends now. drafters: names of the engine's drafters."""
    start = session.span_start
    attributes: dict[str, str | int | Sequence[str]] = {
        "outrider.session_id": str(session.id),
        "outrider.drafters": list(drafters),
        "gen_ai.usage.input_tokens": session.prompt_length,
        "outrider.followed_tokens": session.length - start.length,
    }
    tracing.add("draft", start.traceparent, start.time, time.time_ns(), attributes)
