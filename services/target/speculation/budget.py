"""The verification budget: which draft tokens are worth their cost, over all sessions of a step together.

A step commits one token per session in the time of its tokens. One more draft token adds its probability in tokens and
delays every session of the step. So draft tokens are taken in order of probability, as many as maximize the step's
throughput. Time for which a step is held for proposals, and time in which draft tokens are made, counts as well. The
time of prompts in a step does not: beside them no more draft tokens are worth their cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.tree import TreeSlice
from services.target.speculation.draft_wait import longest_wait
from services.target.speculation.estimates.average import WEIGHT
from services.target.speculation.estimates.step_cost import StepCost, free

# Tokens of a session in a step, root included, without a flag; the budget chooses among them. Of as many further ones
# the cheapest decides whether any draft token is worth its cost.
TOKENS_PER_SESSION = 16
# Tokens of an EAGLE head's usual tree, and the cost of its verification over a plain step above which trees are
# expensive: a head hardly commits twice as many tokens.
_TREE_TOKENS, _EXPENSIVE = 12, 2.0


def promised(draft: TreeSlice) -> float:
    """Draft tokens that a draft's scores promise to be accepted."""
    return float(np.exp(draft.path_scores).sum()) if len(draft) else 0.0


def min_score(probability: float, ratio: float) -> float:
    """Log of the uncalibrated path probability that corresponds to a calibrated one."""
    return math.log(probability / ratio) if probability > 0.0 else -math.inf


def throughput(
    cost: StepCost,
    gains: NDArray[np.float64],
    added: NDArray[np.integer],
    sessions: int,
    tokens: int,
    kv_tokens: int,
    drafting: float | NDArray[np.floating[Any]] = 0.0,
) -> NDArray[np.float64]:
    """Tokens per second of a step's sessions with n different drafts: the objective of every choice.

    gains: [n], draft tokens expected to be accepted; added: [n], draft tokens to verify; tokens: of the step without
    them, prompts included; drafting: [n], seconds in which the draft tokens are made or waited for
    """
    seconds = cost.seconds(tokens + added, kv_tokens) - cost.prefill(tokens, sessions)
    rates: NDArray[np.float64] = (sessions + gains) / (seconds + drafting)
    return rates


class Selection(NamedTuple):
    """How many of each draft's tokens to verify, and the throughput of the step with them, in tokens per second."""

    counts: list[int]
    throughput: float


class Budget:
    """Chooses how many of each session's draft tokens a step verifies.

    cost: of a step; held: seconds for which the engine does not compute before each step, an average
    """

    def __init__(self, cost: StepCost | None = None) -> None:
        self.cost = cost or free()
        self.held = 0.0

    @property
    def trees_are_expensive(self) -> bool:
        """True if verifying a head's tree takes one session as long as plain steps for as many tokens."""
        plain, tree = self.cost.seconds(np.array([1, _TREE_TOKENS]))
        return bool(tree > _EXPENSIVE * plain)

    def waited(self, seconds: float) -> None:
        """Add the time for which the engine did not compute before a step. A pause for want of work is no wait."""
        if seconds < longest_wait(self.cost.step(1, 0)[0]):
            self.held += WEIGHT * (seconds - self.held)

    def min_probability(self, tokens: int, sessions: int, kv_tokens: int = 0) -> float:
        """Probability below which no draft token is worth its cost in a step of some tokens and sessions.

        Its gain must exceed what the plain step commits in the time of the cheapest of the next tokens.
        """
        if not sessions:
            return 1.0
        seconds, cheapest = self.cost.step(tokens, kv_tokens, TOKENS_PER_SESSION)
        return sessions / (self.held + seconds - self.cost.prefill(tokens, sessions)) * cheapest

    def plain_throughput(self, sessions: int, kv_tokens: int) -> float:
        """Tokens per second of some sessions without draft tokens."""
        return sessions / self.cost.step(sessions, kv_tokens)[0]

    def select(
        self,
        drafts: Sequence[TreeSlice],
        ratios: Sequence[float],
        tokens: int,
        kv_tokens: int = 0,
        sessions: int | None = None,
        held: float | None = None,
    ) -> Selection:
        """How many draft tokens of each draft to verify. Each draft has its best first.

        drafts: of sessions that sample in this step, with their calibration ratios. tokens: of the step without draft
        tokens. sessions: those that sample, if there are more than drafts. held: seconds for which the step is held,
        if not the average.
        """
        counts = [len(draft) for draft in drafts]
        if not any(counts):
            return Selection(counts, 0.0)
        owners = np.repeat(np.arange(len(drafts)), counts)
        scores = np.concatenate([draft.path_scores for draft in drafts]).astype(np.float64)
        chances = np.minimum(np.exp(scores) * np.repeat(np.array(ratios, np.float64), counts), 1.0)
        order = np.argsort(-chances, kind="stable")
        gains = np.concatenate([[0.0], np.cumsum(chances[order])])
        waiting = self.held if held is None else held
        added = np.arange(len(gains))
        rates = throughput(self.cost, gains, added, sessions or len(drafts), tokens, kv_tokens, waiting)
        # More tokens win a tie, and a difference below rounding is one: they cost nothing.
        taken = int(np.flatnonzero(rates >= rates.max() * (1.0 - 1e-9))[-1])
        chosen = np.bincount(owners[order[:taken]], minlength=len(drafts)).tolist()
        return Selection(chosen, float(rates[taken]))
