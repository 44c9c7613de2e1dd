"""The spans of a session on the target, made when it ends: queue, prefill, decode."""

from __future__ import annotations

import time

from outrider.serving.session import Session
from outrider.tracing import Tracing, Value


def record(tracing: Tracing, session: Session) -> None:
    """Record how a session's time was spent. A session that ended early has fewer spans."""
    now = time.time_ns()
    admitted, first = session.admitted_at or now, session.first_at or now
    own: dict[str, Value] = {"outrider.session_id": str(session.id)}
    tracing.add("queue", session.traceparent, session.opened_at, admitted, own)
    if session.admitted_at:
        prompt: dict[str, Value] = {
            "gen_ai.usage.input_tokens": session.prompt_length,
            "gen_ai.usage.cache_read.input_tokens": session.cached_tokens,
            "outrider.committed_tokens": session.opened_length
            - session.prompt_length,  # elsewhere, before it came here
        }
        tracing.add("prefill", session.traceparent, admitted, first, own | prompt)
    if session.first_at:
        answer: dict[str, Value] = {"gen_ai.usage.output_tokens": session.length - session.opened_length}
        tracing.add("decode", session.traceparent, first, now, own | answer)
