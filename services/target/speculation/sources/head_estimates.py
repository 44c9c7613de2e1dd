"""Estimates of a local EAGLE head: how often its draft tokens are accepted, what drafting costs, what chains bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.target.sampling.session import TargetSession
from services.target.speculation.budget import throughput
from services.target.speculation.estimates.cached_estimate import CachedEstimate
from services.target.speculation.estimates.calibration_bins import CalibrationBins
from services.target.speculation.estimates.linear_cost import LinearCost
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.sources.base import PREDICTION_INTERVAL
from services.target.step.batch import SessionWork
from services.target.step.programs import DraftTokenValue, LoopIteration

USUAL_ROWS = 4  # of a session that the head writes before it drafts; more are no measurement of drafting
_EMA_WEIGHT = 0.05  # of the last chain in what chains are like
_NEXT_RATE = 0.6  # acceptance rate of a draft token of which nothing is known yet
# Drafting cost before it is measured, over a plain step: fixed, and per draft token.
_PRIOR_FIXED, _PRIOR_EACH = 0.06, 0.05
# Chains before any evidence, of sampled sessions and of greedy ones: accepted, drafted and verified tokens.
_PRIOR_CHAINS = ((0.5, 2.0, 2.0), (0.9, 2.5, 2.5))


class VerifiedChain(NamedTuple):
    """What is verified of a session.

    probabilities: of its draft tokens; second_candidates: their probabilities, by place
    """

    probabilities: list[float]
    second_candidates: dict[int, float]
    greedy: bool


@dataclass
class ChainAverage:
    """Recent chains of greedy or of sampled sessions: accepted, drafted and verified tokens."""

    accepted: float
    drafted: float
    verified: float

    def add_draft(self, drafted: int, verified: int) -> None:
        """A chain was drafted, of which some tokens are verified."""
        self.drafted += _EMA_WEIGHT * (drafted - self.drafted)
        self.verified += _EMA_WEIGHT * (verified - self.verified)

    def add_outcome(self, accepted: int) -> None:
        """A chain was verified."""
        self.accepted += _EMA_WEIGHT * (accepted - self.accepted)


class HeadEstimates:
    """Of one engine's head.

    acceptance, second_acceptance: of draft tokens, and of second candidates where the first is rejected
    averages:       recent chains, of sampled sessions and of greedy ones
    drafting_costs: by batch size, seconds by tokens of a chain
    token_values:   what draft tokens cost and gain, by batch size
    """

    def __init__(self, sessions: Mapping[int, TargetSession], verifying: Callable[[], StepCost]) -> None:
        """sessions: those that are open, by id. verifying: returns the cost model of the verification."""
        self._sessions, self._verifying = sessions, verifying
        self.drafting_costs: dict[int, LinearCost] = {}
        self.token_values = CachedEstimate[DraftTokenValue](PREDICTION_INTERVAL)
        self.forget()

    def forget(self) -> None:
        """Drop what sessions have taught."""
        self.acceptance, self.second_acceptance = CalibrationBins(), CalibrationBins()
        self.averages = [ChainAverage(*prior) for prior in _PRIOR_CHAINS]

    def observe(self, chain: VerifiedChain, accepted_chain: int, accepted: int, *, goes_on: bool) -> None:
        """A chain was verified.

        accepted_chain: accepted tokens of the chain itself; accepted: second candidates included
        goes_on: as of DraftSource.observe
        """
        self.averages[chain.greedy].add_outcome(accepted)
        for probability in chain.probabilities[:accepted_chain]:
            self.acceptance.observe(probability, accepted=True, greedy=chain.greedy)
        if goes_on and accepted_chain < len(chain.probabilities):
            self.acceptance.observe(chain.probabilities[accepted_chain], accepted=False, greedy=chain.greedy)
            if accepted_chain in chain.second_candidates:
                right, probability = accepted > accepted_chain, chain.second_candidates[accepted_chain]
                self.second_acceptance.observe(probability, accepted=right, greedy=chain.greedy)

    def observe_iterations(self, iterations: Sequence[LoopIteration], *, greedy: bool, goes_on: bool) -> None:
        """Learn from iterations in which the head drafted. goes_on: as of ModelSource.observe_loop."""
        average = self.averages[greedy]
        for number, one in enumerate(iterations, 1):
            average.add_draft(one.drafted, one.verified)
            second_candidates = {place: one.probabilities[place][1] for place in one.alternatives}
            chain = VerifiedChain([first for first, _ in one.probabilities], second_candidates, greedy)
            self.observe(chain, one.accepted_chain, one.accepted, goes_on=goes_on or number < len(iterations))
            if one.written <= USUAL_ROWS:
                self.drafting_cost(1).observe(one.drafted, one.draft_seconds)

    def throughput(self, sessions: int, kv_tokens: int) -> float:
        """As of ModelSource."""
        entries = self._sessions.values()
        greedy = sum(entry.session.sampling.greedy for entry in entries) / max(len(entries), 1)
        accepted = drafted = verified = 0.0
        for average, share in zip(self.averages, (1.0 - greedy, greedy), strict=True):
            accepted += share * average.accepted
            drafted += share * average.drafted
            verified += share * average.verified
        drafting = self.drafting_cost(sessions).seconds(drafted)
        gains, added = np.array([sessions * accepted]), np.array([round(sessions * verified)])
        return float(throughput(self._verifying(), gains, added, sessions, sessions, kv_tokens, drafting)[0])

    def drafting_cost(self, sessions: int) -> LinearCost:
        """Cost model of drafting for a batch of this size, by tokens of a chain."""
        if sessions not in self.drafting_costs:
            step, _ = self._verifying().step(sessions, 0)
            self.drafting_costs[sessions] = LinearCost(_PRIOR_FIXED * step, _PRIOR_EACH * step)
        return self.drafting_costs[sessions]

    def token_value(self, works: Sequence[SessionWork], others: int = 0) -> DraftTokenValue:
        """Costs and gains of draft tokens, as of one of the last steps. others: tokens of the step beside these."""
        sessions, kv_tokens = len(works), sum(work.chunk.stop for work in works)
        return self.token_values.get((sessions, others > 0), lambda: self._estimate_value(sessions, kv_tokens, others))

    def _estimate_value(self, sessions: int, kv_tokens: int, others: int) -> DraftTokenValue:
        few, more = self._verifying().seconds(others + sessions * np.array([2, 4]), kv_tokens).tolist()
        token = 1.0 / self.throughput(sessions, kv_tokens)
        step = self.drafting_cost(sessions).each
        return DraftTokenValue(_NEXT_RATE * token, token, max(more - few, 0.0) / (2 * sessions), step)
