"""The local EAGLE head (model/eagle_head.py) as a draft source: it drafts a chain for each session.

The head gives each draft token a probability. The acceptance rate at each probability is measured, and chains are
drafted and verified as far as the tokens that they promise are worth their cost.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import MessageWatch
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.tree import TreeSlice
from services.target.kernels.cpu.sampling import HeadDraftTokens
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.model.eagle_head import EagleHead
from services.target.sampling.session import TargetSession
from services.target.speculation.multi_step import interrupts, texts
from services.target.speculation.planner import Planner
from services.target.speculation.sources.base import (
    MAX_CHAIN,
    MAX_ITERATIONS,
    Demand,
    Drafts,
    ModelSource,
    scored_chain,
    verifiable,
)
from services.target.speculation.sources.head_estimates import USUAL_ROWS, HeadEstimates
from services.target.speculation.sources.head_kv import HeadKV
from services.target.step.batch import SamplingPlan, SessionWork, build
from services.target.step.programs import DraftTokenValue, FusedLoop, HeadDrafting, HeadInLoop, LoopIteration


class LocalEagleHead(ModelSource):
    """Drafts for one engine's sessions.

    head:      computes the draft tokens
    kv:        which rows of each session the head has written
    estimates: cost and throughput of its chains
    """

    kind = SourceKind.HEAD

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
        self.estimates = HeadEstimates(planner, sessions)
        super().__init__(planner, sessions)
        self._device, self.head, self._cache = model.device, head, cache
        self.kv = HeadKV(prefix)
        self._probabilities: dict[int, list[float]] = {}  # of the last draft tokens, by session

    def forget(self) -> None:
        """As of DraftSource."""
        self.estimates.forget()

    def launched(self, works: Sequence[SessionWork]) -> None:
        """As of DraftSource."""
        self.kv.invalidate(works)

    def closed(self, session_id: int) -> None:
        """As of DraftSource."""
        self.kv.close(session_id)

    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """As of DraftSource."""
        del draft
        greedy = self._sessions[session_id].session.sampling.greedy
        self.estimates.observe(self._probabilities.pop(session_id), len(path), greedy=greedy, goes_on=goes_on)

    def observe_loop(self, session: Session, iterations: Sequence[LoopIteration], *, goes_on: bool) -> None:
        """As of ModelSource."""
        start, known = self.kv.missing_rows(session).chunk.start, iterations[-1].known
        if known > start:
            self.kv.mark_written(Chunk(session, start, known))
        self.estimates.observe_iterations(iterations, greedy=session.sampling.greedy, goes_on=goes_on)
        length, cost = session.length, self._planner.budget.cost
        for one in iterations:
            cost.observe(1 + one.verified, length, one.verify_seconds)
            length += one.committed

    def throughput(self, sessions: int, kv_tokens: int) -> float:
        """As of ModelSource."""
        return self.estimates.throughput(sessions, kv_tokens)

    # --- drafting ---

    def loop(self, work: SessionWork, seconds: float) -> FusedLoop | None:
        """As of ModelSource."""
        depth = self._depth(work)
        if depth < 1 or len(self.kv.missing_rows(work.chunk.session).chunk) > self._max_rows:
            return None
        session = work.chunk.session
        room = min(self._planner.room(session), MAX_ITERATIONS * (depth + 1))
        if not self._reserve([work], room):
            return None
        entries = [self._sessions[session.id]]
        known = self.kv.missing_rows(session).chunk.start
        head = HeadInLoop(known, self.estimates.token_value([work]), self.estimates.acceptance.table)
        return FusedLoop(MAX_ITERATIONS, interrupts(entries), texts(entries, room), seconds, room, depth, head)

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
        value = self.estimates.token_value(works, others)
        tokens = self.draft_tokens(works, most, value, listen)
        drafts = {}
        for place, work in enumerate(works):
            session_id = work.chunk.session.id
            draft = self._chosen(session_id, place, tokens, value)
            average = self.estimates.averages[self._sessions[session_id].session.sampling.greedy]
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
            program = HeadDrafting(most, interrupts(entries, files), value, self.estimates.acceptance.table)
            batch = build(missing, self._device, sampling=sampling, program=program, ahead=1)
            tokens = self.head.draft(batch, self._cache)
        for work in missing:
            self.kv.mark_written(work.chunk)
        if len(batch) <= USUAL_ROWS * len(works):
            self.estimates.drafting_cost(len(works)).observe(len(tokens.tokens), time.perf_counter() - started)
        return tokens

    def _chosen(self, session_id: int, place: int, drafted: HeadDraftTokens, value: DraftTokenValue) -> TreeSlice:
        """The session's draft tokens that are worth verifying. place: of the session in the batch."""
        entry = self._sessions[session_id]
        greedy = entry.session.sampling.greedy
        tokens, probabilities = drafted.tokens[:, place].tolist(), drafted.probabilities[:, place].tolist()
        least, reach = value.row / value.token, 1.0
        scores: list[float] = []
        for probability in probabilities[: verifiable(entry, tokens[: self._planner.most(entry.session)])]:
            reach *= self.estimates.acceptance.rate(probability, greedy=greedy)
            if scores and reach < least:  # the first one is always verified: a step of one token costs as much
                break
            scores.append(reach)
        count = len(scores)
        self._probabilities[session_id] = probabilities[:count]
        return scored_chain(tokens[:count], np.log(np.array(scores, np.float32)))
