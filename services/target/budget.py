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
from services.target.cost import StepCost, free
from services.target.patience import LONGEST

_KEPT = 0.97  # what remains of the evidence after a step that adds to it
_KEPT_AFTER_PAUSE = 0.3  # ... and when a drafter that was given up turns out right: it may be another by now
_PRIOR = 2.0  # promised nodes that the prior counts for
_LEAST, _MOST = 0.01, 2.0
_NEW = 0.2  # weight of the last wait in their average
_SPREAD = 7919  # a prime: neighbouring sessions are tried in unlike steps
_SOONEST, _AGAIN, _LATEST = 8, 64, 128  # steps after which a drafter that was given up is tried again


class Calibration:
    """Accepted over promised nodes, of one session or of all. Evidence fades, for texts change.

    A drafter whose hints are left aside gives no evidence. So now and then one node is tried all the same (`due`), ever
    more seldom as long as that fails.
    """

    def __init__(self, prior: float = 1.0, pause: int = _SOONEST, steps: int = 0) -> None:
        """pause: steps between tries; steps: how many of them are over."""
        self._prior = prior
        self._promised = 0.0
        self._accepted = 0.0
        self._pause = pause
        self._steps = steps  # since evidence came

    def heir(self, session_id: int) -> Calibration:
        """A new session's, where all others are: with tries as seldom, and not in the same step as everybody's."""
        return Calibration(self.ratio, self._pause, session_id * _SPREAD % self._pause)

    @property
    def ratio(self) -> float:
        """Factor for probabilities."""
        ratio = (self._accepted + _PRIOR * self._prior) / (self._promised + _PRIOR)
        return min(max(ratio, _LEAST), _MOST)

    @property
    def due(self) -> bool:
        """True if one node should be tried, whatever it seems to be worth."""
        return self._steps >= self._pause

    def observe(self, promised: float, accepted: int) -> None:
        """Take in one step. promised: sum of its nodes' probabilities. accepted: nodes on the accepted path."""
        self._steps += 1
        if not promised:
            return
        kept = _KEPT_AFTER_PAUSE if accepted and self._steps >= _SOONEST else _KEPT
        self._steps = 0
        if accepted and promised > 1.0:  # more than a try: its worth is known
            self._pause = _SOONEST
        else:  # a try that succeeds is no reason for many more where hints that succeed do not pay
            self._pause = max(self._pause // 2, _AGAIN) if accepted else min(2 * self._pause, _LATEST)
        self._promised = self._promised * kept + promised
        self._accepted = self._accepted * kept + accepted


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
