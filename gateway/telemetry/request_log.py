"""One log line per answer: its outcome and figures, never its text."""

from __future__ import annotations

import logging
import time

from gateway.sessions.session import Session

log = logging.getLogger(__name__)
log.disabled = True  # until --enable-log-requests


def enable(enabled: bool) -> None:
    """Switch the log of answers on or off."""
    log.disabled = not enabled


def answer_ended(session: Session, outcome: str, model: str = "") -> None:
    """Log the end of an answer. As JSON, its figures are fields. model: one of several; otherwise empty."""
    if log.disabled or not session.request.counted:
        return
    stats, now = session.stats, time.perf_counter()
    figures = {
        "outcome": outcome,
        "prompt_tokens": session.prompt_length,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": session.new_tokens,
        "seconds": round(now - stats.opened_at, 6),
        "first_token_seconds": round(stats.first_at - stats.opened_at, 6) if stats.steps else None,
        "steps": len(stats.steps),
        "verified_draft_tokens": stats.verified,
        "accepted_draft_tokens": stats.accepted,
        "session_id": session.id,
        **({"model": model} if model else {}),
    }
    log.info(
        "an answer%s ended (%s): %d + %d tokens in %.3f s, %d steps, %d of %d draft tokens accepted",
        f" of {model}" if model else "", outcome, session.prompt_length, session.new_tokens, figures["seconds"],
        len(stats.steps), stats.accepted, stats.verified, extra=figures,
    )  # fmt: skip
