"""Evaluation of draft chains on batches: how many draft tokens of a chain verification would accept behind each row."""

from __future__ import annotations

import jax
import numpy as np
from numpy.typing import NDArray

from services.draft.learning.objective import Objective, TargetWeights
from services.draft.learning.records.batches import Batch
from services.draft.model.params import Params


class ChainEvaluator:
    """Accepted draft tokens of chains along the recorded text."""

    def __init__(self, objective: Objective, target: TargetWeights) -> None:
        self._rank_tokens = jax.jit(objective.rank_tokens)
        self._match_chances = jax.jit(objective.match_chances)
        self._target = target

    def follow(self, target: TargetWeights) -> None:
        """Compare with other weights of the target from now on. Any thread may call."""
        self._target = target

    def accepted(self, params: Params, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Accepted tokens behind each row, [B, R], and which rows count, [B, R]."""
        known, rank = map(np.asarray, self._rank_tokens(params, self._target, batch))
        return np.cumprod(known & (rank == 0), axis=0).sum(axis=0), known[0]

    def expected(self, params: Params, batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Expected accepted tokens behind each row, [B, R], and which rows count, [B, R].

        Of greedy answers those of `accepted`; of sampled ones the mean over samples.
        """
        known, chance = map(np.asarray, self._match_chances(params, self._target, batch))
        return np.cumprod(known * chance.astype(np.float64), axis=0).sum(axis=0), known[0]
