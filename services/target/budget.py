"""Which hints are worth their rows: measured cost against calibrated probability.

A row more costs a share of a plain step, measured at start-up. It holds up every session of the step, so a node must be
accepted with the probability at which it brings as many tokens as that time is worth to all of them; below it the node
makes the service slower and is left out. Drafters' scores are estimates of unlike kinds, so they are calibrated:
scaled by how many nodes were accepted for every one that the scores promised, in this session and in all.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.speculation.tree import TreeSlice

_KEPT = 0.97  # what remains of the evidence at the next step
_PRIOR = 2.0  # promised nodes that the prior counts for
_LEAST, _MOST = 0.01, 2.0


class Calibration:
    """Accepted over promised nodes, of one session or of all. Evidence fades: what was given up is tried again."""

    def __init__(self, prior: float = 1.0) -> None:
        self._prior = prior
        self._promised = 0.0
        self._accepted = 0.0

    @property
    def ratio(self) -> float:
        """Factor for probabilities."""
        ratio = (self._accepted + _PRIOR * self._prior) / (self._promised + _PRIOR)
        return min(max(ratio, _LEAST), _MOST)

    def observe(self, promised: float, accepted: int) -> None:
        """Take in one step. promised: sum of its nodes' probabilities. accepted: nodes on the accepted path."""
        self._promised = self._promised * _KEPT + promised
        self._accepted = self._accepted * _KEPT + accepted


def promised(draft: TreeSlice) -> float:
    """Nodes that a draft's scores promise to be accepted."""
    return float(np.exp(draft.path_scores).sum()) if len(draft) else 0.0


def row_share(plain_seconds: float, seconds: float, extra_rows: int) -> float:
    """Cost of a row in plain steps, from the time of a plain step and of one with extra rows; in [0, 1]."""
    return min(max((seconds - plain_seconds) / (plain_seconds * extra_rows), 0.0), 1.0)


def break_even(share: float, sessions: int) -> float:
    """Probability at which a row pays in a step of so many sessions.

    A plain step of n sessions takes 1 + (n - 1) share and brings n tokens; a row takes share, brings its probability.
    """
    return sessions * share / (1.0 + (sessions - 1) * share)


def least_score(share: float, sessions: int, ratio: float) -> float:
    """Log of the uncalibrated path probability below which a node does not pay."""
    return math.log(break_even(share, sessions) / ratio) if share > 0.0 else -math.inf
