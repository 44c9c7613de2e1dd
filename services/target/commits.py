"""Commits that tell more than tokens: the first of a session, one that ends it from outside, and one that has none."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from outrider.speculation.proposal import Commit, FinishReason
from services.target.drawing import Entry


def first(commit: Commit, entry: Entry) -> Commit:
    """The first commit of a session, with what it tells besides."""
    entry.session.first_at = time.time_ns()
    prompt = entry.prompt_scores
    return replace(
        commit,
        cached_tokens=entry.session.cached_tokens,
        prompt_logprobs=None if prompt is None else prompt.whole(),
    )


def aborted(entry: Entry) -> Commit:
    """The last word of a session that is ended from outside."""
    return replace(_empty(entry), finish_reason=FinishReason.ABORT)


def hush(entry: Entry) -> Commit:
    """A word to drafters before the next commit, so that they leave a long prompt unread."""
    entry.session.hushed = True
    return replace(_empty(entry), wanted=0)


def _empty(entry: Entry) -> Commit:
    session = entry.session
    return Commit(session.id, session.length, np.empty(0, np.uint32), entry.tree.root_hash)
