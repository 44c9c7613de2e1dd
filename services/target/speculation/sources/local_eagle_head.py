"""The local EAGLE head (model/eagle_head.py) as a draft source: it drafts a chain for each session.

The head gives each draft token a probability. The acceptance rate at each probability is measured, and chains are
drafted and verified as far as the tokens that they promise are worth their cost.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import MessageWatch
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.tree import TreeSlice
from services.target.kernels.cpu.sampling import HeadDraftTokens
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.model.eagle_head import EagleHead
from services.target.sampling.session import TargetSession
from services.target.speculation.estimates.calibration_bins import CalibrationBins
from services.target.speculation.estimates.linear_cost import LinearCost
from services.target.speculation.multi_step import interrupts, texts
from services.target.speculation.planner import Planner
from services.target.speculation.sources.base import MAX_CHAIN, Demand, Drafts, ModelSource, scored_chain, verifiable
from services.target.speculation.sources.head_kv import HeadKV
from services.target.step.batch import SamplingPlan, SessionWork, build
from services.target.step.programs import DraftTokenValue, FusedLoop, HeadDrafting, HeadInLoop, LoopIteration

_EMA_WEIGHT = 0.05  # of the last chain in what chains are like
_NEXT_RATE = 0.6  # acceptance rate of a draft token of which nothing is known yet
_MAX_ITERATIONS = 8  # of a fused loop
_USUAL_ROWS = 4  # of a session that the head writes before it drafts; more are no measurement of drafting
# Drafting cost before it is measured, over a plain step: fixed, and per draft token.
_PRIOR_FIXED, _PRIOR_EACH = 0.06, 0.05
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
        self.drafted += _EMA_WEIGHT * (drafted - self.drafted)
        self.verified += _EMA_WEIGHT * (verified - self.verified)

    def add_outcome(self, accepted: int) -> None:
        """A chain was verified."""
        self.accepted += _EMA_WEIGHT * (accepted - self.accepted)


class LocalEagleHead(ModelSource):
    """Drafts for one engine's sessions.

    head:           computes the draft tokens
    kv:             which rows of each session the head has written
    averages:       recent chains, of sampled sessions and of greedy ones
    drafting_costs: by batch size, seconds by tokens of a chain
    """

    min_speedup = 1.1

    def __init__(
        self,
        model: Model,
        head: EagleHead,
        cache: KVCache,
        prefix: PrefixCache,
        planner: Planner,
        sessions: Mapping[int, TargetSession],
    ) -> None:
        """sessions: those that are open, by id."""
        super().__init__(planner, sessions)
        self._device, self.head, self._cache = model.device, head, cache
        self.kv = HeadKV(prefix)
        self.drafting_costs: dict[int, LinearCost] = {}
        self._probabilities: dict[int, list[float]] = {}  # of the draft tokens of the present step, by session

    def forget(self) -> None:
        """As of DraftSource."""
        self.acceptance = CalibrationBins()
        self.averages = [ChainAverage(*prior) for prior in _PRIOR_CHAINS]

    def launched(self, works: Sequence[SessionWork]) -> None:
        """As of DraftSource."""
        self.kv.invalidate(works)

    def closed(self, session_id: int) -> None:
        """As of DraftSource."""
        self.kv.close(session_id)

    # --- acceptance ---

    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """As of DraftSource."""
        del draft
        greedy = self._sessions[session_id].session.sampling.greedy
        self._observe(self._probabilities.pop(session_id), len(path), greedy=greedy, goes_on=goes_on)

    def _observe(self, probabilities: Sequence[float], accepted: int, *, greedy: bool, goes_on: bool) -> None:
        """Learn from a verified chain. probabilities: of its draft tokens."""
        self.averages[greedy].add_outcome(accepted)
        for probability in probabilities[:accepted]:
            self.acceptance.observe(probability, accepted=True, greedy=greedy)
        if goes_on and accepted < len(probabilities):
            self.acceptance.observe(probabilities[accepted], accepted=False, greedy=greedy)

    def observe_loop(self, session: Session, iterations: Sequence[LoopIteration], *, goes_on: bool) -> None:
        """As of ModelSource."""
        start, known = self.kv.missing_rows(session).chunk.start, iterations[-1].known
        if known > start:
            self.kv.mark_written(Chunk(session, start, known))
        greedy, length = session.sampling.greedy, session.length
        for number, one in enumerate(iterations, 1):
            self.averages[greedy].add_draft(one.drafted, one.verified)
            went_on = goes_on or number < len(iterations)
            self._observe(one.probabilities, one.accepted, greedy=greedy, goes_on=went_on)
            if one.written <= _USUAL_ROWS:
                self.drafting_cost(1).observe(one.drafted, one.draft_seconds)
            self._planner.budget.cost.observe(1 + one.verified, length, one.verify_seconds)
            length += one.committed

    # --- costs ---

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
            self.drafting_costs[sessions] = LinearCost(_PRIOR_FIXED * step, _PRIOR_EACH * step)
        return self.drafting_costs[sessions]

    def token_value(self, works: Sequence[SessionWork], others: int = 0) -> DraftTokenValue:
        """Costs and gains of draft tokens. others: tokens of the step beside those of these sessions."""
        sessions, kv_tokens = len(works), sum(work.chunk.stop for work in works)
        cost = self._planner.budget.cost
        (few, _), (more, _) = (cost.step(others + sessions * tokens, kv_tokens) for tokens in (2, 4))
        token = 1.0 / self.throughput(sessions, kv_tokens)
        row = max(more - few, 0.0) / (2 * sessions)
        return DraftTokenValue(_NEXT_RATE * token, token, row, self.drafting_cost(sessions).each)

    # --- drafting ---

    def loop(self, work: SessionWork, seconds: float) -> FusedLoop | None:
        """As of ModelSource."""
        depth = self._depth(work)
        if depth < 1 or len(self.kv.missing_rows(work.chunk.session).chunk) > self._max_rows:
            return None
        session = work.chunk.session
        room = min(self._planner.room(session), _MAX_ITERATIONS * (depth + 1))
        if not self._reserve([work], room):
            return None
        entries = [self._sessions[session.id]]
        known = self.kv.missing_rows(session).chunk.start
        head = HeadInLoop(known, self.token_value([work]), self.acceptance.table)
        return FusedLoop(_MAX_ITERATIONS, interrupts(entries), texts(entries, room), seconds, room, depth, head)

    def _depth(self, work: SessionWork) -> int:
        """Most draft tokens of a chain for one session."""
        session = work.chunk.session
        return min(self._most([work]), self._planner.most(session)) if session.length > 1 else 0

    def draft(self, demand: Demand, listen: MessageWatch) -> Drafts:
        """As of ModelSource."""
        self._probabilities.clear()
        others = demand.tokens - len(demand.works)
        works = self._caught_up([work for work in demand.works if work.chunk.session.length > 1])
        if not works:
            return {}
        most = min(self._most(works), max(self._depth(work) for work in works))
        if most < 1 or not self._reserve(works, most):
            return {}
        value = self.token_value(works, others)
        tokens = self.draft_tokens(works, most, value, listen)
        drafts = {}
        for place, work in enumerate(works):
            session_id = work.chunk.session.id
            draft = self._chosen(session_id, place, tokens, value)
            average = self.averages[self._sessions[session_id].session.sampling.greedy]
            average.add_draft(len(tokens.tokens), len(draft))
            if len(draft):
                drafts[session_id] = draft
            else:
                average.add_outcome(0)
        return drafts

    @property
    def _max_rows(self) -> int:
        """Rows that the head may write at once, as many as tokens of a step of the model: other sessions wait."""
        return self._planner.scheduler.limits.step_tokens or sys.maxsize

    def _caught_up(self, works: Sequence[SessionWork]) -> list[SessionWork]:
        """Those whose rows the head can write now; of the first other one, such as a long prompt, it writes some."""
        ready: list[SessionWork] = []
        behind: Chunk | None = None
        room, least = self._max_rows, MAX_CHAIN + 1
        for work in works:
            chunk = self.kv.missing_rows(work.chunk.session).chunk
            if len(chunk) <= max(room, least):
                ready.append(work)
                room -= len(chunk)
            elif behind is None:
                behind = chunk
        if behind is not None:
            self._write(Chunk(behind.session, behind.start, behind.start + max(room, least)))
        return ready

    @torch.inference_mode()
    def _write(self, chunk: Chunk) -> None:
        """Write some rows; the token sampled behind them is not used."""
        entry = self._sessions[chunk.session.id]
        sampling = SamplingPlan(entry.sampling, array("q", [1]), array("q", [chunk.session.length]))
        program = HeadDrafting(1, interrupts([entry]))
        self.head.draft(
            build([SessionWork(chunk)], self._device, sampling=sampling, program=program, ahead=1), self._cache
        )
        self.kv.mark_written(chunk)

    @torch.inference_mode()
    def draft_tokens(
        self, works: Sequence[SessionWork], most: int, value: DraftTokenValue, listen: MessageWatch
    ) -> HeadDraftTokens:
        """Draft tokens of each session, as long as another one is worth its cost."""
        started = time.perf_counter()
        entries = [self._sessions[work.chunk.session.id] for work in works]
        missing = [self.kv.missing_rows(work.chunk.session) for work in works]
        positions = array("q", [work.chunk.session.length for work in works])
        sampling = SamplingPlan(b"".join(entry.sampling for entry in entries), array("q", [1] * len(works)), positions)
        with listen() as files:
            program = HeadDrafting(most, interrupts(entries, files), value, self.acceptance.table)
            batch = build(missing, self._device, sampling=sampling, program=program, ahead=1)
            tokens = self.head.draft(batch, self._cache)
        for work in missing:
            self.kv.mark_written(work.chunk)
        if len(batch) <= _USUAL_ROWS * len(works):
            self.drafting_cost(len(works)).observe(len(tokens.tokens), time.perf_counter() - started)
        return tokens

    def _chosen(self, session_id: int, place: int, drafted: HeadDraftTokens, value: DraftTokenValue) -> TreeSlice:
        """The session's draft tokens that are worth verifying. place: of the session in the batch."""
        entry = self._sessions[session_id]
        greedy = entry.session.sampling.greedy
        tokens, probabilities = drafted.tokens[:, place].tolist(), drafted.probabilities[:, place].tolist()
        least, reach = value.row / value.token, 1.0
        scores: list[float] = []
        for probability in probabilities[: verifiable(entry, tokens[: self._planner.most(entry.session)])]:
            reach *= self.acceptance.rate(probability, greedy=greedy)
            if scores and reach < least:  # the first one is always verified: a step of one token costs as much
                break
            scores.append(reach)
        count = len(scores)
        self._probabilities[session_id] = probabilities[:count]
        return scored_chain(tokens[:count], np.log(np.array(scores, np.float32)))
