"""Speculation statistics of a session, step by step, and sums of them by draft source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from outrider.speculation.draft_source import SourceKind


class StepStats(NamedTuple):
    """One step of a session: tokens committed, draft tokens verified, and draft tokens accepted, the first of `tokens`.

    draft: the draft tokens that the draft service scored highest, if it drafted and the session's draft is watched
    source: SourceKind of the draft tokens; 0 if the step verified none
    """

    tokens: int
    verified: int
    accepted: int
    draft: tuple[int, ...] = ()
    source: int = 0


PLAIN_STEP = StepStats(1, 0, 0)


SourceCounts = dict[int, tuple[int, int]]
"""Verified and accepted draft tokens by the SourceKind of their source."""


def add_counts(counts: SourceCounts, source: int, verified: int, accepted: int) -> None:
    """Add the draft tokens of a step."""
    before = counts.get(source, (0, 0))
    counts[source] = before[0] + verified, before[1] + accepted


def source_counts(steps: Iterable[StepStats]) -> SourceCounts:
    """The draft tokens of some steps."""
    counts: SourceCounts = {}
    for step in steps:
        if step.verified:
            add_counts(counts, step.source, step.verified, step.accepted)
    return counts


def by_label(counts: SourceCounts) -> dict[str, tuple[int, int]]:
    """Counts by the sources' labels, in the order of SourceKind."""
    return {kind.label: counts[kind] for kind in SourceKind if kind in counts}


def first_steps(steps: Sequence[StepStats], tokens: int) -> list[StepStats]:
    """The steps of the first tokens; the last of them is cut to the tokens that belong."""
    kept: list[StepStats] = []
    for step in steps:
        if tokens <= 0:
            break
        kept.append(step._replace(tokens=min(step.tokens, tokens), accepted=min(step.accepted, tokens)))
        tokens -= step.tokens
    return kept
