"""The spans of a session on the target, made when it ends: queue, prefill, decode."""

from __future__ import annotations

import time

from outrider.serving.session import Session
from outrider.tracing import Tracing, Value


def add_spans(tracing: Tracing, session: Session) -> None:
    """Record how a session's time was spent. A session that ended early has fewer spans."""
    now, record = time.time_ns(), session.record
    admitted, first = record.admitted_at or now, record.first_at or now
    own: dict[str, Value] = {"outrider.session_id": str(session.id)}
    tracing.add("queue", record.traceparent, record.opened_at, admitted, own)
    if record.admitted_at:
        prompt: dict[str, Value] = {
            "gen_ai.usage.input_tokens": session.prompt_length,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            # Elsewhere, before it came here.
            "outrider.committed_tokens": session.opened_length - session.prompt_length,
        }
        tracing.add("prefill", record.traceparent, admitted, first, own | prompt)
    if record.first_at:
        answer: dict[str, Value] = {"gen_ai.usage.output_tokens": session.length - session.opened_length}
        tracing.add("decode", record.traceparent, first, now, own | answer)
