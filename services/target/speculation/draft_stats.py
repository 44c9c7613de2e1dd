"""What became of the draft service's draft tokens, for the metrics: lag, waste, and why a step had none.

Nothing is counted before the first proposal arrives: an engine without a draft service has no cost.
"""

from __future__ import annotations

from bisect import bisect_left

from outrider.serving.messages import DraftStats
from outrider.serving.session import Session
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import Proposal
from outrider.speculation.tree import SpeculationTree

LAG_BOUNDS = (0, 1, 2, 4, 8, 16, 32)  # tokens; the buckets of the wire's DraftStats.lag_histogram


class DraftStatsRecorder:
    """Counts since the start. unverified: draft tokens that were dropped without verification."""

    def __init__(self) -> None:
        self.unverified = 0
        self._received = 0
        self._without_drafter = self._paused = self._late = self._empty = self._not_selected = 0
        self._lags = [0] * (len(LAG_BOUNDS) + 1)
        self._lag_tokens = 0
        self._answers: dict[int, int] = {}  # by session with a drafter: the committed length that its last answer knew

    @property
    def started(self) -> bool:
        """True once a proposal has arrived."""
        return any(self._lags)

    def received(self, proposal: Proposal, length: int, added: int, known: int) -> None:
        """A proposal arrived and was merged.

        length: of its session, in tokens. added: draft tokens new in the tree; known: those of its draft tokens that
        are in the tree now, the others were dropped.
        """
        dropped = len(proposal.tokens) - known
        self._received += added + dropped
        self.unverified += dropped
        behind = max(length - proposal.committed_length, 0)
        self._lags[bisect_left(LAG_BOUNDS, behind)] += 1
        self._lag_tokens += behind
        self._answers[proposal.session_id] = proposal.committed_length

    def paused(self, sessions: int) -> None:
        """A step samples tokens of some sessions while drafting is paused."""
        self._paused += sessions

    def missed(self, session: Session, tree: SpeculationTree) -> None:
        """A step samples a session's token without a draft token to verify."""
        if session.length == session.opened_length:
            return
        answered = self._answers.get(session.id)
        if SourceKind.DRAFT not in session.drafting.sources:
            self._paused += 1
        elif answered is None:
            self._without_drafter += 1
        elif tree:
            self._not_selected += 1
        elif answered < session.length:
            self._late += 1
        else:
            self._empty += 1

    def ended(self, session_id: int, tree: SpeculationTree) -> None:
        """A session has ended; the draft tokens in its tree are never verified."""
        self.unverified += len(tree)
        self._answers.pop(session_id, None)

    def load(self) -> DraftStats | None:
        """The counts; None before the first proposal."""
        if not self.started:
            return None
        return DraftStats(
            self._received, self.unverified, self._without_drafter, self._paused, self._late, self._empty,
            self._not_selected, tuple(self._lags), self._lag_tokens,
        )  # fmt: skip
