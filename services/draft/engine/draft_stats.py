"""What drafters promised and what came of it: counted at every commit, and told with the engine's load.

A node had its chance if its parent was committed: then it either came next, or did not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.serving.messages import DrafterStats
from outrider.speculation.tree import ROOT
from services.draft.sessions.session import DraftSession

log = logging.getLogger(__name__)

# A drafter of which less than this part of what it promised comes true does not know the target.
_LEAST_PART = 0.15
_PROMISES = 300.0  # promised nodes after which that is believed


@dataclass
class Record:
    """Of one drafter: nodes that had their chance, the sum of their probabilities, and how many were committed.

    chances: tokens that it could have foretold, those that another drafter foretold left out
    """

    name: str
    offered: int = 0
    promised: float = 0.0
    accepted: int = 0
    chances: int = 0
    judged: bool = False

    def load(self) -> DrafterStats:
        """As it is told."""
        return DrafterStats(self.name, self.offered, self.promised, self.accepted, self.chances)

    def judge(self) -> None:
        """Warn once, after the first promises, if nearly none was kept."""
        if self.judged or self.promised < _PROMISES:
            return
        self.judged = True
        if self.accepted < _LEAST_PART * self.promised:
            log.warning(
                "%s promised that %.0f of its tokens would be accepted, and %d were: draft and target look as if they "
                "do not belong together. Check that the draft was made for this model, and how it is read",
                self.name, self.promised, self.accepted,
            )  # fmt: skip


def observe(records: Sequence[Record], session: DraftSession, tokens: Sequence[int], path: Sequence[int]) -> None:
    """Count what tokens, about to be committed, say of the nodes. path: the nodes among them; by drafter, records."""
    tree, origin = session.tree, session.origin
    for parent, token in zip((ROOT, *path), tokens, strict=False):
        speakers: set[int] = set()
        foretold = -1  # by this drafter
        for child in tree.children_of(parent):
            record = records[origin[child]]
            speakers.add(origin[child])
            record.offered += 1
            record.promised += math.exp(tree.log_score[child])
            if tree.token[child] == token:
                foretold = origin[child]
                record.accepted += 1
        for speaker in speakers if foretold < 0 else (foretold,):
            records[speaker].chances += 1
    for record in records:
        record.judge()
