"""Commits that tell more than tokens: the first of a session, one that ends it from outside, and one that has none; and
those of rounds that were computed in one go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.proposal import Commit, FinishReason
from services.target.sampling.session import TargetSession
from services.target.step.fused_loop import LoopRound


def first(commit: Commit, entry: TargetSession) -> Commit:
    """The first commit of a session, with what it tells besides."""
    entry.session.first_at = time.time_ns()
    prompt = entry.prompt_scores
    return replace(
        commit,
        cached_tokens=entry.session.cached_tokens,
        prompt_logprobs=None if prompt is None else prompt.whole(),
    )


def of_earlier_rounds(
    entry: TargetSession, rounds: Sequence[LoopRound], tokens: NDArray[np.uint32]
) -> tuple[list[Commit], NDArray[np.uint32]]:
    """A commit for each of a session's rounds but the last, whose tokens become its own, and the tokens of the last.

    tokens: those of all rounds, [n]
    """
    said: list[Commit] = []
    for one in rounds[:-1]:
        part, tokens = tokens[: one.committed], tokens[one.committed :]
        base = entry.session.length
        entry.append(part)
        commit = Commit(entry.session.id, base, part, entry.tree.root_hash, one.nodes, one.accepted, draft_budget=0)
        said.append(commit if base > entry.session.opened_length else first(commit, entry))
    return said, tokens


def aborted(entry: TargetSession) -> Commit:
    """The last word of a session that is ended from outside."""
    return replace(_empty(entry), finish_reason=FinishReason.ABORT)


def hush(entry: TargetSession) -> Commit:
    """A word to drafters before the next commit, so that they leave a long prompt unread."""
    entry.session.drafting_paused = True
    return replace(_empty(entry), draft_budget=0)


def _empty(entry: TargetSession) -> Commit:
    session = entry.session
    return Commit(session.id, session.length, np.empty(0, np.uint32), entry.tree.root_hash)
