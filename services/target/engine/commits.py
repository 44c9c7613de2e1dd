"""Commits that carry more than tokens: the first of a session, one that ends it from outside, one that pauses drafting,
and those of the earlier iterations of a fused loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import Commit, FinishReason
from services.target.sampling.session import TargetSession
from services.target.step.programs import LoopIteration


def first(commit: Commit, entry: TargetSession) -> Commit:
    """The first commit of a session, with cached tokens and the prompt's log-probabilities."""
    entry.session.record.first_at = time.time_ns()
    prompt = entry.prompt_scores
    return replace(
        commit,
        cached_tokens=entry.session.record.cached_tokens,
        prompt_logprobs=None if prompt is None else prompt.whole(),
    )


def of_earlier_iterations(
    entry: TargetSession, iterations: Sequence[LoopIteration], tokens: NDArray[np.uint32], kind: SourceKind
) -> tuple[list[Commit], NDArray[np.uint32]]:
    """A commit for each iteration of a session's loop but the last, whose tokens are appended to the session.

    tokens: of all iterations, [n]. kind: of the draft tokens' source. Returns the commits, and the tokens of the last
    iteration.
    """
    commits: list[Commit] = []
    for one in iterations[:-1]:
        part, tokens = tokens[: one.committed], tokens[one.committed :]
        base = entry.session.length
        entry.append(part)
        commit = Commit(
            entry.session.id, base, part, entry.tree.root_hash, one.verified, one.accepted, draft_budget=0,
            source=kind if one.verified else 0,
        )  # fmt: skip
        commits.append(commit if base > entry.session.opened_length else first(commit, entry))
    return commits, tokens


def aborted(entry: TargetSession) -> Commit:
    """The last commit of a session that is ended from outside."""
    return replace(_empty(entry), finish_reason=FinishReason.ABORT)


def paused(entry: TargetSession) -> Commit:
    """A commit without tokens that pauses drafting, so that drafters leave a long prompt unread."""
    entry.session.drafting.paused = True
    return replace(_empty(entry), draft_budget=0)


def _empty(entry: TargetSession) -> Commit:
    session = entry.session
    return Commit(session.id, session.length, np.empty(0, np.uint32), entry.tree.root_hash)
