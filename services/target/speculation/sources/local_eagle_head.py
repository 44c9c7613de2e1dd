"""Chains from a head behind the model (model/head.py), as long as it is sure of them.

    root ── guess 1 ── guess 2 ── guess 3        beside a guess may stand the one that comes next if it is wrong
        └── other 1

The head says how probable its guesses are. How often guesses of such a probability were right is counted, and chains
are drafted and verified as far as the tokens that they promise are worth the time that they take.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import MessageWatch
from outrider.serving.scheduler import Chunk, Scheduler
from outrider.serving.session import Session
from outrider.speculation.tree import TreeSlice
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.model.head import Head, HeadDraftTokens
from services.target.sampling.session import TargetSession
from services.target.speculation.estimates.cached_estimate import CachedEstimate
from services.target.speculation.estimates.calibration_bins import CalibrationBins
from services.target.speculation.estimates.linear_cost import LinearCost
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.multi_step import multi_step_of
from services.target.speculation.planner import Planner
from services.target.speculation.sources.base import LONGEST, DraftSource, drawable
from services.target.speculation.sources.head_kv import HeadKV
from services.target.step.batch import DraftTokenValue, MultiStep, SamplingPlan, SessionWork, build
from services.target.step.fused_loop import FusedLoop, LoopRound

SPARE = 2  # guesses beside which another may stand
_NODES_A_SPARE = 4  # that a session must allow for each of them: of few, those of the chain itself bring more
_NEW = 0.05  # weight of the last chain in what chains are like
_NEXT = 0.6  # chance that a guess is right of which nothing is known yet
_ROUNDS = 8  # in one go, at most
_ROUND_ROWS = LONGEST + 1  # of a session that has committed as much as it can since the head wrote the last of them
_USUAL_ROWS = 4  # of a session that a head has to write before it drafts; more are no example of others
_PRIOR_SHARES = (0.06, 0.05)  # of a step of the model: what guesses take once, and each, as long as nobody knows
# Of a chain, as long as nobody knows, of sampled sessions and of greedy ones: accepted tokens, guesses that were
# drafted, and rows that were verified.
_PRIOR = ((0.5, 2.0, 2.0), (0.9, 2.5, 2.5))
_LEAD = 1.1  # that guesses must promise over plain steps, whose bursts spare what lies between two steps
_AGAIN = 16  # steps after which it is asked again what they bring
_TRIAL = 256  # steps without guesses, where they do not, until one is tried: texts change


class _Chain(NamedTuple):
    """What is verified of a session. odds: what the head said of its guesses; others: of those beside, by place."""

    odds: list[float]
    others: dict[int, float]
    greedy: bool


@dataclass
class _Kind:
    """What chains of a kind of sessions are like lately: accepted tokens, guesses that were drafted, rows verified."""

    accepted: float
    drafted: float
    verified: float

    def drew(self, guesses: int, rows: int) -> None:
        """A chain was drafted."""
        self.drafted += _NEW * (guesses - self.drafted)
        self.verified += _NEW * (rows - self.verified)

    def got(self, accepted: int) -> None:
        """A chain was verified."""
        self.accepted += _NEW * (accepted - self.accepted)


class LocalEagleHead(DraftSource):
    """Drafts for one engine's sessions."""

    def __init__(
        self,
        model: Model,
        head: Head,
        cache: KVCache,
        prefix: PrefixCache,
        planner: Planner,
        scheduler: Scheduler,
        entries: Mapping[int, TargetSession],
        cost: Callable[[], StepCost] | None = None,
    ) -> None:
        """entries: of the sessions that are open, by id. cost: of what verifies, if that is not the model."""
        super().__init__(planner, scheduler, entries)
        self._cost = cost or (lambda: planner.budget.cost)
        self._device, self._head, self._cache = model.device, head, cache
        self.rows = HeadKV(prefix)
        self._lines: dict[int, LinearCost] = {}  # what guesses take, by sessions
        self._chains: dict[int, _Chain] = {}
        self._paying, self._priced = (
            CachedEstimate[bool](_AGAIN),
            CachedEstimate[DraftTokenValue](_AGAIN),
        )  # by sessions
        self._unpaid = 0  # steps without guesses

    def forget(self) -> None:
        """Begin anew with what texts taught."""
        self.guesses, self.others = CalibrationBins(), CalibrationBins()
        self._kinds = [_Kind(*prior) for prior in _PRIOR]

    def computed(self, works: Sequence[SessionWork]) -> None:
        """As of DraftSource."""
        self.rows.computed(works)

    def close(self, session_id: int) -> None:
        """As of DraftSource."""
        self.rows.close(session_id)

    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """As of DraftSource."""
        del draft  # is the chain that was kept
        chain = self._chains.pop(session_id)
        right = sum(node < len(chain.odds) for node in path)
        self._observe(chain, right, len(path), goes_on=goes_on)

    def _observe(self, chain: _Chain, right: int, accepted: int, *, goes_on: bool) -> None:
        """right: accepted guesses of the chain itself; accepted: with those beside it."""
        self._kinds[chain.greedy].got(accepted)
        for odds in chain.odds[:right]:
            self.guesses.observe(odds, right=True, greedy=chain.greedy)
        if goes_on and right < len(chain.odds):
            self.guesses.observe(chain.odds[right], right=False, greedy=chain.greedy)
            if right in chain.others:
                self.others.observe(chain.others[right], right=accepted > right, greedy=chain.greedy)

    def rounds(self, work: SessionWork, seconds: float) -> MultiStep | None:
        """As of DraftSource."""
        depth = self._depth(work)
        if depth < 1 or len(self.rows.lacking(work.chunk.session).chunk) > self._at_once:
            return None
        room = min(self._planner.room(work.chunk.session), _ROUNDS * (depth + 1))
        return self._guessing(work, depth, FusedLoop(seconds, room)) if self._reserve([work], room + SPARE) else None

    def beside(self, work: SessionWork, rounds: FusedLoop) -> MultiStep | None:
        """Rounds of a copy in which the head guesses, if that promises more; some rows may be written before it does.

        There is room for `SPARE` tokens more than rounds commit.
        """
        depth = min(self._depth(work), rounds.longest - 1)
        if depth < 1 or not self.pays([work]) or not self._caught_up([work]):
            return None
        return self._guessing(work, depth, rounds)

    def _depth(self, work: SessionWork) -> int:
        """Guesses of a round, at most, for a session that is alone."""
        session = work.chunk.session
        if session.length < 2:
            return 0
        return min(self._most([work]), self._nodes(session) - self._others(session))

    def _nodes(self, session: Session) -> int:
        """That a step may verify of a session."""
        return min(session.max_draft_tokens, self._planner.max_rows - 1)

    def _others(self, session: Session) -> int:
        """Guesses beside which another may stand."""
        return min(SPARE, self._nodes(session) // _NODES_A_SPARE)

    def _guessing(self, work: SessionWork, depth: int, rounds: FusedLoop) -> MultiStep:
        session = work.chunk.session
        burst = multi_step_of([self._entries[session.id]], _ROUNDS, (), room=rounds.room)
        known = self.rows.lacking(session).chunk.start
        others = self._others(session)
        guessing = replace(rounds, known=known, depth=depth, others=others, second_odds=self.others.table)
        return replace(burst, worth=self._worth([work]), odds=self.guesses.table, rounds=guessing)

    def learn(self, session: Session, rounds: Sequence[LoopRound], *, goes_on: bool) -> None:
        """As of DraftSource."""
        self.wrote(session, rounds[-1].known)
        self.saw(rounds, greedy=session.sampling.greedy, goes_on=goes_on)
        length, cost = session.length, self._cost()
        for one in rounds:
            cost.observe(1 + one.nodes, length, one.verifying)
            length += one.committed

    def wrote(self, session: Session, known: int) -> None:
        """So many rows of a session were written in rounds."""
        start = self.rows.lacking(session).chunk.start
        if known > start:
            self.rows.wrote(Chunk(session, start, known))

    def saw(self, rounds: Sequence[LoopRound], *, greedy: bool, goes_on: bool) -> None:
        """What came of rounds in which the head guessed, and how long that took. goes_on: as of `learn`."""
        kind = self._kinds[greedy]
        for place, one in enumerate(rounds, 1):
            kind.drew(one.guesses, one.nodes)
            chain = _Chain([odds[0] for odds in one.odds], {i: one.odds[i][1] for i in one.others}, greedy)
            self._observe(chain, one.right, one.accepted, goes_on=goes_on or place < len(rounds))
            if one.written <= _USUAL_ROWS:
                self._line(1).observe(one.guesses, one.guessing)

    def chains(self, works: Sequence[SessionWork], listen: MessageWatch, beside: int = 0) -> dict[int, TreeSlice]:
        """As of DraftSource."""
        self._chains.clear()
        works = self._caught_up([work for work in works if work.chunk.session.length > 1])
        if not works:
            return {}
        most = min(self._most(works), max(self._depth(work) for work in works))
        if most < 1 or not self._reserve(works, most + SPARE):
            return {}
        worth = self._worth(works, beside)
        drafts = self._draft(works, most, worth, listen)
        chains = {}
        for place, work in enumerate(works):
            session_id = work.chunk.session.id
            chain = self._chosen(session_id, place, drafts, worth)
            kind = self._kinds[self._entries[session_id].session.sampling.greedy]
            kind.drew(len(drafts.tokens), len(chain))
            if len(chain):
                chains[session_id] = chain
            else:
                kind.got(0)
        return chains

    def pays(self, works: Sequence[SessionWork]) -> bool:
        """As of DraftSource. Where it does not, it is tried now and then all the same."""
        pays = self._paying.get(len(works), lambda: self._promise(works))
        self._unpaid = 0 if pays or self._unpaid >= _TRIAL else self._unpaid + 1
        return not self._unpaid

    def _promise(self, works: Sequence[SessionWork]) -> bool:
        """True if guesses promise enough over plain steps."""
        keys = sum(work.chunk.stop for work in works)
        step, _ = self._cost().step(len(works), keys)
        return self.rate(len(works), keys) > _LEAD / step

    def rate(self, sessions: int, keys: int) -> float:
        """As of DraftSource."""
        cost = self._cost()
        greedy = sum(entry.session.sampling.greedy for entry in self._entries.values()) / max(len(self._entries), 1)
        accepted = drafted = verified = 0.0
        for kind, share in zip(self._kinds, (1.0 - greedy, greedy), strict=True):
            accepted += share * kind.accepted
            drafted += share * kind.drafted
            verified += share * kind.verified
        verifying = float(cost.seconds(round(sessions * (1.0 + verified)), keys))
        return (1.0 + accepted) / (self._line(sessions).seconds(drafted) + verifying)

    def _line(self, sessions: int) -> LinearCost:
        """What guesses of so many sessions take."""
        if sessions not in self._lines:
            step, _ = self._cost().step(sessions, 0)
            self._lines[sessions] = LinearCost(*(share * step for share in _PRIOR_SHARES))
        return self._lines[sessions]

    def _worth(self, works: Sequence[SessionWork], beside: int = 0) -> DraftTokenValue:
        """What guesses cost and bring, as of one of the last steps. beside: rows of others"""
        sessions, keys = len(works), sum(work.chunk.stop for work in works)
        return self._priced.get((sessions, beside > 0), lambda: self._price(sessions, keys, beside))

    def _price(self, sessions: int, keys: int, beside: int = 0) -> DraftTokenValue:
        cost = self._cost()
        few, more = cost.seconds(beside + sessions * np.array([2, 4]), keys).tolist()
        token = 1.0 / (self.rate(sessions, keys) * sessions)
        return DraftTokenValue(_NEXT * token, token, max(more - few, 0.0) / (2 * sessions), self._line(sessions).each)

    @property
    def _at_once(self) -> int:
        """Rows that a head may write at once, as long as those of a step of the model may be: others wait meanwhile."""
        return self._scheduler.limits.step_tokens or sys.maxsize

    def _caught_up(self, works: Sequence[SessionWork]) -> list[SessionWork]:
        """Those whose rows the head can write now; of the first other, such as a long prompt, it writes some."""
        ready: list[SessionWork] = []
        behind: Chunk | None = None
        room = self._at_once
        for work in works:
            chunk = self.rows.lacking(work.chunk.session).chunk
            if len(chunk) <= max(room, _ROUND_ROWS):
                ready.append(work)
                room -= len(chunk)
            elif behind is None:
                behind = chunk
        if behind is not None:
            self._write(Chunk(behind.session, behind.start, behind.start + max(room, _ROUND_ROWS)))
        return ready

    @torch.inference_mode()
    def _write(self, chunk: Chunk) -> None:
        """Some rows, and nothing drawn behind them that anybody reads."""
        entry = self._entries[chunk.session.id]
        draws = SamplingPlan(entry.sampling, array("q", [1]), array("q", [chunk.session.length]))
        burst = replace(multi_step_of([entry], 1, ()), follows=True)
        self._head.draft(build([SessionWork(chunk)], self._device, draws=draws, burst=burst, ahead=1), self._cache)
        self.rows.wrote(chunk)

    @torch.inference_mode()
    def _draft(
        self, works: Sequence[SessionWork], most: int, worth: DraftTokenValue, listen: MessageWatch
    ) -> HeadDraftTokens:
        """Guesses of each session, as long as another one is worth its time."""
        started = time.perf_counter()
        entries = [self._entries[work.chunk.session.id] for work in works]
        lacking = [self.rows.lacking(work.chunk.session) for work in works]
        places = array("q", [work.chunk.session.length for work in works])
        draws = SamplingPlan(b"".join(entry.sampling for entry in entries), array("q", [1] * len(works)), places)
        with listen() as files:
            burst = replace(multi_step_of(entries, most, files), follows=True, worth=worth, odds=self.guesses.table)
            batch = build(lacking, self._device, draws=draws, burst=burst, ahead=1)
            drafts = self._head.draft(batch, self._cache)
        for work in lacking:
            self.rows.wrote(work.chunk)
        if len(batch) <= _USUAL_ROWS * len(works):
            self._line(len(works)).observe(len(drafts.tokens), time.perf_counter() - started)
        return drafts

    def _chosen(self, session_id: int, place: int, drafts: HeadDraftTokens, worth: DraftTokenValue) -> TreeSlice:
        """Those of a session's guesses whose verification is worth its time. place: of the session among all."""
        entry = self._entries[session_id]
        greedy = entry.session.sampling.greedy
        tokens, odds = drafts.tokens[:, place].tolist(), drafts.odds[:, place].tolist()
        spare = self._others(entry.session)
        most = self._nodes(entry.session) - spare
        least, reach = worth.row / worth.token, 1.0
        scores: list[float] = []
        others: dict[int, float] = {}
        beside: list[float] = []
        for i in range(drawable(entry, tokens[:most])):
            chance = self.guesses.chance(odds[i][0], greedy=greedy)
            if i and reach * chance < least:  # the first one is verified in any case: a step of a row costs as much
                break
            if i < spare and drafts.seconds[i, place] >= 0:
                score = reach * (1.0 - chance) * self.others.chance(odds[i][1], greedy=greedy)
                if score >= least:
                    others[i] = odds[i][1]
                    beside.append(score)
            reach *= chance
            scores.append(reach)
        count = len(scores)
        self._chains[session_id] = _Chain([one[0] for one in odds[:count]], others, greedy)
        return tree_of(tokens[:count], [int(drafts.seconds[i, place]) for i in others], list(others), scores + beside)


def tree_of(chain: list[int], others: list[int], places: list[int], scores: list[float]) -> TreeSlice:
    """A chain with other tokens beside it. places: beside which of its tokens; scores: of the chain, then of others."""
    parents = [*range(-1, len(chain) - 1), *(place - 1 for place in places)]
    above = np.array(parents, np.int32)  # of a chain, a node's place is its depth, counted from 0
    return TreeSlice(np.array(chain + others, np.uint32), above, above + 2, np.log(np.array(scores, np.float32)))
