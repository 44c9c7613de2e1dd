"""What became of hints, for the metrics: how late they came, which were never verified, and why a step had none.

Nothing is counted before the first answer of a draft: an engine that nobody drafts for pays nothing for this.
"""

from __future__ import annotations

from bisect import bisect_left

from outrider.serving.messages import DraftStats
from outrider.serving.session import Session
from outrider.speculation.proposal import Proposal
from outrider.speculation.tree import SpeculationTree

LAG_BOUNDS = (0, 1, 2, 4, 8, 16, 32)  # tokens; those of the wire's DraftStats.lags


class DraftStatsRecorder:
    """Counts since the start. unverified: nodes that were dropped without having been verified."""

    def __init__(self) -> None:
        self.unverified = 0
        self._nodes = 0
        self._undrafted = self._unwanted = self._late = self._empty = self._unpaid = 0
        self._lags = [0] * (len(LAG_BOUNDS) + 1)
        self._lag_tokens = 0
        self._answers: dict[int, int] = {}  # of sessions that are drafted for: the length that the last answer knew

    @property
    def begun(self) -> bool:
        """True once a draft has answered."""
        return any(self._lags)

    def came(self, proposal: Proposal, length: int, added: int, known: int) -> None:
        """An answer has come and was merged.

        length: of its session, in tokens. added: nodes that are new in the tree; known: those of its nodes that are in
        the tree now, the others were dropped.
        """
        dropped = len(proposal.tokens) - known
        self._nodes += added + dropped
        self.unverified += dropped
        behind = max(length - proposal.committed_length, 0)
        self._lags[bisect_left(LAG_BOUNDS, behind)] += 1
        self._lag_tokens += behind
        self._answers[proposal.session_id] = proposal.committed_length

    def rested(self, sessions: int) -> None:
        """A step is about to draw tokens of so many sessions, and nobody is asked for hints."""
        self._unwanted += sessions

    def missed(self, session: Session, tree: SpeculationTree) -> None:
        """A step is about to draw a session's token without a node to verify."""
        if session.length == session.opened_length:
            return
        answered = self._answers.get(session.id)
        if not session.max_draft_tokens:
            self._unwanted += 1
        elif answered is None:
            self._undrafted += 1
        elif tree:
            self._unpaid += 1
        elif answered < session.length:
            self._late += 1
        else:
            self._empty += 1

    def ended(self, session_id: int, tree: SpeculationTree) -> None:
        """A session has ended; nobody will verify what is in its tree."""
        self.unverified += len(tree)
        self._answers.pop(session_id, None)

    def load(self) -> DraftStats | None:
        """What is told of it; None before the first answer."""
        if not self.begun:
            return None
        return DraftStats(
            self._nodes, self.unverified, self._undrafted, self._unwanted, self._late, self._empty, self._unpaid,
            tuple(self._lags), self._lag_tokens,
        )  # fmt: skip
