"""Chains from a narrow copy of the target's weights, which goes on from the cache that the model has written.

How long they are is measured: what a token of the copy takes, what verification takes, and how many tokens were right.

A session that is alone is drafted for and verified in one go (fused_loop.py). If there is a head, it guesses for the
copy, which verifies its guesses as the model verifies the copy's: a token of the chain takes a part of a step
of the copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import MessageWatch
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session
from outrider.speculation.tree import TreeSlice
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.sampling.sampling import sampling_plan
from services.target.sampling.session import TargetSession
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.multi_step import multi_step_of
from services.target.speculation.planner import Planner
from services.target.speculation.sources.base import LONGEST, DraftSource, chain_of
from services.target.speculation.sources.local_eagle_head import SPARE, LocalEagleHead
from services.target.step.batch import MultiStep, SessionWork, build
from services.target.step.fused_loop import FusedLoop, LoopRound

_KEPT = 0.97  # what remains of the evidence after a chain
_PRIOR_SHARE = 0.5  # what a step of the copy takes of one of the model, as long as nobody knows
_PRIOR_RIGHT, _PRIOR = 6.4, 8.0  # tokens of the copy that count as right before the first, and as tried
_ROUNDS = 4  # in one go, at most


class QuantizedSelfDraft(DraftSource):
    """Drafts for one engine's sessions."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        prefix: PrefixCache,
        planner: Planner,
        scheduler: Scheduler,
        entries: Mapping[int, TargetSession],
    ) -> None:
        """entries: of the sessions that are open, by id."""
        self.head: LocalEagleHead | None = None
        if model.head is not None:
            parts = planner, scheduler, entries
            self.head = LocalEagleHead(model, model.head, cache, prefix, *parts, cost=lambda: self.cost)
        self._cost: StepCost | None = None
        super().__init__(planner, scheduler, entries)
        self._model, self._cache = model, cache

    def forget(self) -> None:
        """Begin anew with what texts taught."""
        self._right = self._tried = 0.0
        if self.head is not None:
            self.head.forget()

    @property
    def acceptance(self) -> float:
        """The chance that a token of the copy is the model's, if those before it are."""
        return (self._right + _PRIOR_RIGHT) / (self._tried + _PRIOR)

    @property
    def cost(self) -> StepCost:
        """What a step of the copy takes."""
        if self._cost is None:
            self._cost = self._planner.budget.cost.scaled(_PRIOR_SHARE)
        return self._cost

    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """As of DraftSource."""
        del session_id
        self._observe(len(draft), len(path), goes_on=goes_on)

    def _observe(self, drafted: int, accepted: int, *, goes_on: bool) -> None:
        """Count a chain's tokens."""
        self._right = self._right * _KEPT + accepted
        self._tried = self._tried * _KEPT + accepted + (goes_on and accepted < drafted)

    def computed(self, works: Sequence[SessionWork]) -> None:
        """As of DraftSource."""
        if self.head is not None:
            self.head.computed(works)

    def close(self, session_id: int) -> None:
        """As of DraftSource."""
        if self.head is not None:
            self.head.close(session_id)

    def rounds(self, work: SessionWork, seconds: float) -> MultiStep | None:
        """As of DraftSource."""
        session = work.chunk.session
        most = min(self._most([work]), self._planner.max_rows - 1)
        chain = self._length(1, work.chunk.stop, most)
        room = min(self._planner.room(session), _ROUNDS * (most + 1))
        if not self._reserve([work], room + SPARE):
            return None
        rounds = FusedLoop(seconds, room, chain, most)
        if self.head is not None and (burst := self.head.beside(work, rounds)) is not None:
            return burst
        return replace(multi_step_of([self._entries[session.id]], _ROUNDS, (), room=room), rounds=rounds)

    def learn(self, session: Session, rounds: Sequence[LoopRound], *, goes_on: bool) -> None:
        """As of DraftSource."""
        length, cost = session.length, self._planner.budget.cost
        for place, one in enumerate(rounds, 1):
            self._observe(one.chain, one.right, goes_on=goes_on or place < len(rounds))
            cost.observe(1 + one.chain, length, one.verifying)
            for inner in one.within:
                self.cost.observe(1 + inner.nodes, length, inner.verifying)
            if self.head is not None:
                guessed = [inner for inner in one.within if inner.guesses]
                self.head.saw(guessed, greedy=session.sampling.greedy, goes_on=True)
            length += one.committed
        if self.head is not None:
            self.head.wrote(session, rounds[-1].known)

    def chains(self, works: Sequence[SessionWork], listen: MessageWatch, beside: int = 0) -> dict[int, TreeSlice]:
        """As of DraftSource."""
        steps = self._length(len(works), sum(work.chunk.stop for work in works), self._most(works), beside)
        if not steps or not self._reserve(works, steps):
            return {}
        tokens = self._draft(works, steps, listen)
        return {
            work.chunk.session.id: chain_of(self._entries[work.chunk.session.id], own, self.acceptance)
            for work, own in zip(works, tokens.T.tolist(), strict=True)
        }

    def rate(self, sessions: int, keys: int) -> float:
        """As of DraftSource."""
        return float(self._rates(sessions, keys, LONGEST).max())

    def _length(self, sessions: int, keys: int, most: int, beside: int = 0) -> int:
        """Tokens of the chains that bring most for the time of drafting and verifying them.

        Whether any pay is measured, step by step; beside prompts it is not, so there they must promise to.
        """
        rates = self._rates(sessions, keys, most, beside)
        step, _ = self._planner.budget.cost.step(sessions, keys)
        return 0 if beside and rates.max() < 1.0 / step else int(np.argmax(rates)) + 1

    def _rates(self, sessions: int, keys: int, most: int, beside: int = 0) -> NDArray[np.float64]:
        """Tokens a second of each session, by the length of its chain: 1 to `most`. beside: rows of others."""
        most = max(1, min(most, self._planner.max_rows - 1))
        lengths = np.arange(1, most + 1)
        tokens = np.cumsum(self.acceptance**lengths) + 1.0
        cost = self._planner.budget.cost
        verifying = cost.seconds(beside + sessions * (lengths + 1), keys) - cost.others(beside + sessions, sessions)
        rates: NDArray[np.float64] = tokens / (lengths * self._each(sessions, keys) + verifying)
        return rates

    def _each(self, sessions: int, keys: int) -> float:
        """Seconds of a token of each session's chain."""
        step, _ = self.cost.step(sessions, keys)
        if self.head is not None and sessions == 1:
            return min(step, 1.0 / self.head.rate(1, keys))
        return step

    @torch.inference_mode()
    def _draft(self, works: Sequence[SessionWork], steps: int, listen: MessageWatch) -> NDArray[np.int64]:
        """Up to so many tokens of each session, [n, S]. Less if one of them ends, or somebody calls."""
        entries = [self._entries[work.chunk.session.id] for work in works]
        started = time.perf_counter()
        with listen() as files:
            burst = multi_step_of(entries, steps, files, narrow=True)
            batch = build(works, self._model.device, draws=sampling_plan(works, entries), burst=burst)
            drawn = self._model.runner.forward(batch, self._cache).tokens
        assert drawn is not None, "a model that drafts draws its tokens"
        tokens = drawn.reshape(-1, len(works))
        keys = sum(work.chunk.stop for work in works)
        self.cost.observe(len(works), keys, (time.perf_counter() - started) / len(tokens))
        return tokens
