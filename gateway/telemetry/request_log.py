"""A log line for every answer that ends: how it went, never what it said."""

from __future__ import annotations

import logging
import time

from gateway.sessions.session import Session

log = logging.getLogger(__name__)
log.disabled = True  # until somebody wants it


def enable(wanted: bool) -> None:
    """Whether answers are logged."""
    log.disabled = not wanted


def ended(session: Session, outcome: str) -> None:
    """An answer has ended. In JSON its figures are fields of their own."""
    if log.disabled or not session.counted:
        return
    now = time.perf_counter()
    figures = {
        "outcome": outcome,
        "prompt_tokens": session.prompt_length,
        "cached_tokens": session.cached_tokens,
        "completion_tokens": session.new_tokens,
        "seconds": round(now - session.opened_at, 6),
        "first_token_seconds": round(session.first_at - session.opened_at, 6) if session.steps else None,
        "steps": session.steps,
        "verified_draft_tokens": session.verified,
        "accepted_draft_tokens": session.accepted,
        "session_id": session.id,
    }
    log.info(
        "an answer ended (%s): %d + %d tokens in %.3f s, %d steps, %d of %d draft tokens accepted",
        outcome, session.prompt_length, session.new_tokens, figures["seconds"], session.steps,
        session.accepted, session.verified, extra=figures,
    )  # fmt: skip
