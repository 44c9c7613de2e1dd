"""The quantized self-draft: a copy of the target's weights in fewer bits, which goes on from the target's own KV cache.

The length of its chains maximizes throughput by measured costs and acceptance. A session that is alone is drafted for
and verified in a fused loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.serving.loop import MessageWatch
from outrider.serving.session import Session
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.tree import TreeSlice
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.sampling.session import TargetSession
from services.target.sampling.step_sampler import sampling_plan
from services.target.speculation.budget import throughput
from services.target.speculation.estimates.acceptance import DECAY, AcceptanceEstimate
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.multi_step import interrupts, texts
from services.target.speculation.planner import Planner
from services.target.speculation.sources.base import MAX_CHAIN, MAX_ITERATIONS, Demand, Drafts, ModelSource, chain_of
from services.target.step.batch import SessionWork, build
from services.target.step.programs import CopyDrafting, FusedLoop, LoopIteration

_PRIOR_RATE = 0.8  # acceptance rate before any evidence
_PRIOR_COST = 0.5  # of a step of the copy over one of the model, before it is measured


class QuantizedSelfDraft(ModelSource):
    """Drafts for one engine's sessions.

    estimate: acceptance of the copy's draft tokens
    """

    kind = SourceKind.QUANTIZED
    min_speedup = 1.05  # a smaller one may be an error of the prediction, and ends multi-step decoding

    def __init__(self, model: Model, cache: KVCache, planner: Planner, sessions: Mapping[int, TargetSession]) -> None:
        """sessions: those that are open, by id."""
        self._cost: StepCost | None = None
        super().__init__(planner, sessions)
        self._model, self._cache = model, cache

    def forget(self) -> None:
        """As of DraftSource."""
        self.estimate = AcceptanceEstimate([_PRIOR_RATE], DECAY)

    @property
    def acceptance(self) -> float:
        """Acceptance rate of a token of the copy whose predecessors are accepted."""
        return self.estimate.rate()

    @property
    def cost(self) -> StepCost:
        """The cost model of a step of the copy."""
        if self._cost is None:
            self._cost = self._planner.budget.cost.scaled(_PRIOR_COST)
        return self._cost

    @cost.setter
    def cost(self, cost: StepCost) -> None:
        self._cost = cost

    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """As of DraftSource."""
        del session_id
        self._observe(len(draft), len(path), goes_on=goes_on)

    def _observe(self, drafted: int, accepted: int, *, goes_on: bool) -> None:
        """Count a chain's tokens."""
        self.estimate.observe(accepted + (goes_on and accepted < drafted), accepted)

    def loop(self, work: SessionWork, seconds: float) -> FusedLoop | None:
        """As of ModelSource."""
        session = work.chunk.session
        depth = self.chain_length(1, work.chunk.stop, self._most([work]))
        room = min(self._planner.room(session), MAX_ITERATIONS * (depth + 1))
        if not self._reserve([work], room):
            return None
        entries = [self._sessions[session.id]]
        return FusedLoop(MAX_ITERATIONS, interrupts(entries), texts(entries, room), seconds, room, depth)

    def observe_loop(self, session: Session, iterations: Sequence[LoopIteration], *, goes_on: bool) -> None:
        """As of ModelSource."""
        length = session.length
        for number, one in enumerate(iterations, 1):
            self._observe(one.verified, one.accepted, goes_on=goes_on or number < len(iterations))
            self._planner.budget.cost.observe(1 + one.verified, length, one.verify_seconds)
            self.cost.observe(1, length, one.draft_seconds / one.drafted)
            length += one.committed

    def draft(self, demand: Demand, listen: MessageWatch) -> Drafts:
        """As of ModelSource."""
        works = demand.works
        kv_tokens = sum(work.chunk.stop for work in works)
        steps = self.chain_length(len(works), kv_tokens, self._most(works), demand.tokens - len(works))
        if not steps or not self._reserve(works, steps):
            return {}
        tokens = self._draft(works, steps, listen)
        return {
            work.chunk.session.id: chain_of(self._sessions[work.chunk.session.id], own, self.acceptance)
            for work, own in zip(works, tokens.T.tolist(), strict=True)
        }

    def throughput(self, sessions: int, kv_tokens: int) -> float:
        """As of ModelSource."""
        return float(self._throughputs(sessions, kv_tokens, MAX_CHAIN).max())

    def chain_length(self, sessions: int, kv_tokens: int, most: int, others: int = 0) -> int:
        """Length of the chains that maximize throughput; 0 if beside prompts none exceeds plain decoding.

        others: tokens of the step that are not these sessions' roots
        """
        rates = self._throughputs(sessions, kv_tokens, most, others)
        plain = self._planner.budget.plain_throughput(sessions, kv_tokens)
        return 0 if others and rates.max() < plain else int(np.argmax(rates)) + 1

    def _throughputs(self, sessions: int, kv_tokens: int, most: int, others: int = 0) -> NDArray[np.float64]:
        """Tokens per second of some sessions by chain length, 1 to `most`. others: as of `chain_length`."""
        most = max(1, min(most, self._planner.max_tokens - 1))
        lengths = np.arange(1, most + 1)
        gains = sessions * np.cumsum(self.acceptance**lengths)
        step, _ = self.cost.step(sessions, kv_tokens)
        cost, tokens = self._planner.budget.cost, others + sessions
        return throughput(cost, gains, sessions * lengths, sessions, tokens, kv_tokens, lengths * step)

    @torch.inference_mode()
    def _draft(self, works: Sequence[SessionWork], steps: int, listen: MessageWatch) -> NDArray[np.int64]:
        """Up to `steps` tokens of each session, [n, S]; fewer if a session ends or a message arrives."""
        entries = [self._sessions[work.chunk.session.id] for work in works]
        started = time.perf_counter()
        with listen() as files:
            program = CopyDrafting(steps, interrupts(entries, files))
            batch = build(works, self._model.device, sampling=sampling_plan(works, entries), program=program)
            sampled = self._model.runner.forward(batch, self._cache).tokens
        assert sampled is not None, "a model that drafts samples its tokens"
        tokens = sampled.reshape(-1, len(works))
        kv_tokens = sum(work.chunk.stop for work in works)
        self.cost.observe(len(works), kv_tokens, (time.perf_counter() - started) / len(tokens))
        return tokens
