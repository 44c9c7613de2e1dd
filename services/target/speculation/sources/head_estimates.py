"""Estimates of a local EAGLE head: acceptance rates, cost of drafting, throughput with its chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.target.sampling.session import TargetSession
from services.target.speculation.estimates.average import SLOW_WEIGHT
from services.target.speculation.estimates.calibration_bins import CalibrationBins
from services.target.speculation.estimates.linear_cost import LinearCost
from services.target.speculation.planner import Planner
from services.target.step.batch import SessionWork
from services.target.step.programs import DraftTokenValue, LoopIteration

USUAL_ROWS = 4  # of a session that the head writes before it drafts; more are no measurement of drafting
_NEXT_RATE = 0.6  # acceptance rate of a draft token of which nothing is known yet
_PRIOR_COST = 0.05  # drafting cost over a plain step before it is measured: fixed, and again per draft token
# Chains before any evidence, of sampled sessions and of greedy ones: accepted, drafted and verified tokens.
_PRIOR_CHAINS = ((0.5, 2.0, 2.0), (0.9, 2.5, 2.5))


@dataclass
class ChainAverage:
    """Recent chains of greedy or of sampled sessions: accepted, drafted and verified tokens."""

    accepted: float
    drafted: float
    verified: float

    def add_draft(self, drafted: int, verified: int) -> None:
        """A chain was drafted, of which some tokens are verified."""
        self.drafted += SLOW_WEIGHT * (drafted - self.drafted)
        self.verified += SLOW_WEIGHT * (verified - self.verified)

    def add_outcome(self, accepted: int) -> None:
        """A chain was verified."""
        self.accepted += SLOW_WEIGHT * (accepted - self.accepted)


class HeadEstimates:
    """Of one engine's head.

    acceptance:     of draft tokens, by the head's probability
    averages:       recent chains, of sampled sessions and of greedy ones
    drafting_costs: by batch size, seconds by tokens of a chain
    """

    def __init__(self, planner: Planner, sessions: Mapping[int, TargetSession]) -> None:
        """sessions: those that are open, by id."""
        self._planner, self._sessions = planner, sessions
        self.drafting_costs: dict[int, LinearCost] = {}
        self.forget()

    def forget(self) -> None:
        """Drop what sessions have taught."""
        self.acceptance = CalibrationBins()
        self.averages = [ChainAverage(*prior) for prior in _PRIOR_CHAINS]

    def observe(self, probabilities: Sequence[float], accepted: int, *, greedy: bool, goes_on: bool) -> None:
        """A chain was verified. probabilities: of its draft tokens; goes_on: as of DraftSource.observe."""
        self.averages[greedy].add_outcome(accepted)
        for probability in probabilities[:accepted]:
            self.acceptance.observe(probability, accepted=True, greedy=greedy)
        if goes_on and accepted < len(probabilities):
            self.acceptance.observe(probabilities[accepted], accepted=False, greedy=greedy)

    def observe_iterations(self, iterations: Sequence[LoopIteration], *, greedy: bool, goes_on: bool) -> None:
        """Learn from a fused loop. goes_on: as of ModelSource.observe_loop."""
        for number, one in enumerate(iterations, 1):
            self.averages[greedy].add_draft(one.drafted, one.verified)
            went_on = goes_on or number < len(iterations)
            self.observe(one.probabilities, one.accepted, greedy=greedy, goes_on=went_on)
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
        step, _ = self._planner.budget.cost.step(sessions * (1.0 + verified), kv_tokens)
        return sessions * (1.0 + accepted) / (step + self.drafting_cost(sessions).seconds(drafted))

    def drafting_cost(self, sessions: int) -> LinearCost:
        """Cost model of drafting for a batch of this size, by tokens of a chain."""
        if sessions not in self.drafting_costs:
            step, _ = self._planner.budget.cost.step(sessions, 0)
            self.drafting_costs[sessions] = LinearCost(_PRIOR_COST * step, _PRIOR_COST * step)
        return self.drafting_costs[sessions]

    def token_value(self, works: Sequence[SessionWork], others: int = 0) -> DraftTokenValue:
        """Costs and gains of draft tokens. others: tokens of the step beside those of these sessions."""
        sessions, kv_tokens = len(works), sum(work.chunk.stop for work in works)
        cost = self._planner.budget.cost
        (few, _), (more, _) = (cost.step(others + sessions * tokens, kv_tokens) for tokens in (2, 4))
        token = 1.0 / self.throughput(sessions, kv_tokens)
        row = max(more - few, 0.0) / (2 * sessions)
        return DraftTokenValue(_NEXT_RATE * token, token, row, self.drafting_cost(sessions).each)
