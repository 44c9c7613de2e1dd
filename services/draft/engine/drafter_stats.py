"""Statistics of the draft tokens of each drafter: counted at every commit, and reported with the engine's load.

A node is counted when its parent is committed, because the commit then shows whether the node was accepted.
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

# A drafter does not fit the target if fewer than this fraction of the expected draft tokens are accepted.
_MIN_CALIBRATION = 0.15
_MIN_EXPECTED = 300.0  # expected accepted draft tokens before the calibration is checked


@dataclass
class DrafterStatsRecorder:
    """Counts of one drafter. Fields as in DrafterStats.

    offered:  nodes whose parent was committed
    promised: sum of their probabilities
    accepted: nodes that were committed
    chances:  committed tokens below a node with children of this drafter, without those that another drafter predicted
    """

    name: str
    offered: int = 0
    promised: float = 0.0
    accepted: int = 0
    chances: int = 0
    checked: bool = False

    def load(self) -> DrafterStats:
        """The counts for the engine's load."""
        return DrafterStats(self.name, self.offered, self.promised, self.accepted, self.chances)

    def check_calibration(self) -> None:
        """Log a warning, once, if nearly all of the first draft tokens were rejected."""
        if self.checked or self.promised < _MIN_EXPECTED:
            return
        self.checked = True
        if self.accepted < _MIN_CALIBRATION * self.promised:
            log.warning(
                "%s expected %.0f of its draft tokens to be accepted, but %d were: draft and target seem to be a wrong "
                "pair. Check that the draft was trained for this model, and its --speculative-algorithm",
                self.name, self.promised, self.accepted,
            )  # fmt: skip


def count_commit(
    stats: Sequence[DrafterStatsRecorder], session: DraftSession, tokens: Sequence[int], path: Sequence[int]
) -> None:
    """Count the nodes that a commit decides. tokens: about to be committed; path: the nodes among them."""
    tree, origin = session.tree, session.grower.origin
    for parent, token in zip((ROOT, *path), tokens, strict=False):
        drafters: set[int] = set()
        hit = -1  # the drafter that predicted the token
        for child in tree.children_of(parent):
            own = stats[origin[child]]
            drafters.add(origin[child])
            own.offered += 1
            own.promised += math.exp(tree.log_score[child])
            if tree.token[child] == token:
                hit = origin[child]
                own.accepted += 1
        for drafter in drafters if hit < 0 else (hit,):
            stats[drafter].chances += 1
    for own in stats:
        own.check_calibration()
