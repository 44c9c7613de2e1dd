"""Which hints are worth their rows: measured cost against calibrated probability, over all sessions together.

Each step commits a token a session in the time of its rows. A node more brings, on average, its probability in tokens,
and takes the time of a row, which holds up every session of the step. So nodes are taken in order of probability, and
as many as make the step's tokens per second largest. A step that is held for hints takes that time too, whatever is in
it, so more nodes pay there. What prompts in it take is no part of the price of tokens: beside them no more nodes pay.
Drafters' scores are estimates of unlike kinds, so they are calibrated: scaled by how many nodes were accepted for every
one that the scores promised, in this session and in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.speculation.tree import TreeSlice
from services.target.speculation.draft_wait import LONGEST
from services.target.speculation.estimates.step_cost import StepCost, free

_NEW = 0.2  # weight of the last wait in their average


def promised(draft: TreeSlice) -> float:
    """Nodes that a draft's scores promise to be accepted."""
    return float(np.exp(draft.path_scores).sum()) if len(draft) else 0.0


# Rows of a head's usual tree. Where they take so many times as long as a plain step, it hardly brings that many tokens.
_TREE_ROWS, _DEAR = 12, 2.0


class Budget:
    """Chooses how many of each session's best nodes a step verifies.

    cost: what steps take; held: seconds for which the engine does not compute before each, on average
    """

    def __init__(self, cost: StepCost | None = None) -> None:
        self.cost = cost or free()
        self.held = 0.0

    @property
    def trees_are_dear(self) -> bool:
        """True if to verify a head's tree alone takes a session the time in which plain steps bring as many tokens."""
        plain, hinted = self.cost.seconds(np.array([1, _TREE_ROWS]))
        return bool(hinted > _DEAR * plain)

    def waited(self, seconds: float) -> None:
        """Take in for how long the engine has not computed before a step. A pause, for want of work, is no wait."""
        if seconds < LONGEST:
            self.held += _NEW * (seconds - self.held)

    def least_probability(self, rows: int, sessions: int, keys: int = 0, most: int = 64) -> float:
        """Probability below which no node pays in a step of so many rows and sessions, whatever else is taken.

        It would have to bring more than the plain step brings in the time that the cheapest of `most` more rows takes.
        """
        if not sessions:
            return 1.0
        seconds, cheapest = self.cost.step(rows, keys, most)
        return sessions / (self.held + seconds - self.cost.others(rows, sessions)) * cheapest

    def choose(self, drafts: Sequence[TreeSlice], ratios: Sequence[float], rows: int, keys: int = 0) -> list[int]:
        """How many nodes of each draft to verify; its first ones, as it has the best first.

        drafts: of the sessions that get a token in this step, with their calibrations' ratios. rows: those that the
        step has anyway. keys: of all sessions together.
        """
        counts = [len(draft) for draft in drafts]
        if not any(counts):
            return counts
        owners = np.repeat(np.arange(len(drafts)), counts)
        scores = np.concatenate([draft.path_scores for draft in drafts]).astype(np.float64)
        chances = np.minimum(np.exp(scores) * np.repeat(np.array(ratios, np.float64), counts), 1.0)
        order = np.argsort(-chances, kind="stable")
        tokens = len(drafts) + np.concatenate([[0.0], np.cumsum(chances[order])])
        seconds = self.cost.seconds(rows + np.arange(len(tokens)), keys) - self.cost.others(rows, len(drafts))
        rates = tokens / (self.held + seconds)
        # A tie is decided for more nodes, and what is worse by less than rounding is a tie: they cost nothing.
        taken = int(np.flatnonzero(rates >= rates.max() * (1.0 - 1e-9))[-1])
        return np.bincount(owners[order[:taken]], minlength=len(drafts)).tolist()


def least_score(probability: float, ratio: float) -> float:
    """Log of the uncalibrated path probability that is a calibrated one."""
    return math.log(probability / ratio) if probability > 0.0 else -math.inf
