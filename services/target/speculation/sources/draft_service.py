"""Proposals of draft services as a draft source: merged into each session's draft tree when they arrive.

Of all sessions' draft tokens a step verifies those that maximize its throughput (budget.py), unless flags fix their
number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from outrider.serving.loop import MessageWatch
from outrider.serving.session import Session
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import Proposal
from outrider.speculation.tree import EMPTY_SLICE, TreeSlice
from services.target.sampling.session import TargetSession
from services.target.speculation.budget import min_score, promised
from services.target.speculation.draft_stats import DraftStatsRecorder
from services.target.speculation.estimates.calibration import Calibrations
from services.target.speculation.planner import Planner, last_chunks
from services.target.speculation.sources.base import Demand, Drafts, DraftSource, ModelSource
from services.target.speculation.survivors import expected_gains
from services.target.step.batch import SessionWork
from services.target.step.prepared import MAX_DRAFT, TreeTables

# Tokens that a head on the same cores reads in the time that drafting saves per token: 64 in 3 to 4 ms, while a token
# takes 5 to 7 ms instead of 8 to 11 (the default model on two cores).
_READ_PER_TOKEN = 40
# The same for a draft model of its own, for whose reading the target waits: 0.4 ms for a token where one saves 5.
_READ_PER_TOKEN_ALONE = 12


class DraftService(DraftSource):
    """The draft services' part in one engine's steps."""

    kind = SourceKind.DRAFT

    def __init__(self, planner: Planner, sessions: Mapping[int, TargetSession], vocab_size: int) -> None:
        """sessions: those that are open, by id."""
        self._min_probability = 0.0  # below which no draft token was worth its cost in the last step
        self._vocab_size = vocab_size
        super().__init__(planner, sessions)

    def forget(self) -> None:
        """As of DraftSource."""
        self.calibrations = Calibrations()
        self.stats = DraftStatsRecorder()

    def opened(self, session_id: int) -> None:
        """As of DraftSource."""
        self.calibrations.open(session_id)

    def closed(self, session_id: int) -> None:
        """As of DraftSource. The session's entry is still there."""
        self.calibrations.close(session_id)

    def serves(self, session: Session) -> bool:
        """True if a session allows the draft service."""
        return self.kind in session.drafting.sources

    def merge(self, proposal: Proposal, entry: TargetSession) -> None:
        """Merge a proposal. One with tokens that the model does not know is dropped."""
        known, held = 0, len(entry.tree)
        if len(proposal.tokens) and int(proposal.tokens.max()) < self._vocab_size:
            known = entry.tree.merge(proposal)
        self.stats.received(proposal, entry.session.length, len(entry.tree) - held, known)

    def begin(self, demand: Demand) -> None:
        """Note from which probability on a draft token is worth its cost in a step, with or without draft tokens."""
        self._min_probability = self._planner.budget.min_probability(demand.tokens, demand.sessions, demand.kv_tokens)

    def draft(self, demand: Demand, listen: MessageWatch) -> Drafts:
        """As of DraftSource: those of the proposals that are there."""
        del listen
        entries = [self._sessions[chunk.session.id] for chunk in last_chunks(demand.works)]
        if not any(entry.tree for entry in entries):
            return {}
        planner = self._planner
        drafts = [self._candidates(entry, 0.0 if planner.verifies_all else self._min_probability) for entry in entries]
        if not planner.verifies_all:
            calibrations = [self.calibrations[entry.session.id] for entry in entries]
            ratios = [calibration.ratio for calibration in calibrations]
            counts, _ = planner.budget.select(drafts, ratios, demand.tokens, demand.kv_tokens)
            drafts = [
                draft.head(max(count, 1) if calibration.due else count)
                for calibration, draft, count in zip(calibrations, drafts, counts, strict=True)
            ]
            if demand.rival is not None:
                drafts = self._against(demand.rival, entries, drafts, demand)
        return {
            entry.session.id: planner.reserve_draft(entry.session, draft)
            for entry, draft in zip(entries, drafts, strict=True)
        }

    def room(self, tables: TreeTables, sessions: Sequence[Session], demand: Demand) -> list[int]:
        """Draft tokens of some sessions that a prepared step has room for. tables: of their trees."""
        planner, calibrations = self._planner, [self.calibrations[session.id] for session in sessions]
        most = [min(planner.most(session), MAX_DRAFT) for session in sessions]
        gains = [gain.head(m) for gain, m in zip(expected_gains(tables, max(most)), most, strict=True)]
        ratios = [calibration.ratio for calibration in calibrations]
        counts, _ = planner.budget.select(gains, ratios, demand.tokens, demand.kv_tokens, demand.sessions)
        return [
            max(count, min(int(calibration.due), len(gain)))
            for calibration, count, gain in zip(calibrations, counts, gains, strict=True)
        ]

    def _against(
        self, rival: ModelSource, entries: Sequence[TargetSession], drafts: list[TreeSlice], demand: Demand
    ) -> list[TreeSlice]:
        """The drafts of sessions that allow no rival, and of the others if they are expected to be faster with them.

        Of a draft that is not, a token remains that is due to be tried.
        """
        rivalled = [i for i, e in enumerate(entries) if len(drafts[i]) and rival.kind in e.session.drafting.sources]
        if not rivalled or not rival.exceeds_plain(demand.sessions, demand.kv_tokens):
            return drafts
        calibrations = {i: self.calibrations[entries[i].session.id] for i in rivalled}
        some, ratios = [drafts[i] for i in rivalled], [calibrations[i].ratio for i in rivalled]
        sessions, kv_tokens = len(some), demand.kv_tokens * len(some) // demand.sessions
        expected = self._planner.budget.select(some, ratios, sessions, kv_tokens, held=0.0).throughput
        if expected > rival.throughput(sessions, kv_tokens):
            return drafts
        return [draft.head(int(calibrations[i].due)) if i in calibrations else draft for i, draft in enumerate(drafts)]

    def _candidates(self, entry: TargetSession, probability: float) -> TreeSlice:
        """The likeliest draft tokens of a session, above a probability unless one is due to be tried."""
        depth, most = self._planner.depth(entry.session), self._planner.most(entry.session)
        if depth < 1 or most < 1:
            return EMPTY_SLICE
        admits = entry.admits if entry.matcher is not None else None
        calibration = self.calibrations[entry.session.id]
        lowest = -math.inf if calibration.due else min_score(probability, calibration.ratio)
        return entry.tree.select(most, depth, self._planner.max_children, lowest, admits)

    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """As of DraftSource."""
        del goes_on
        self.calibrations[session_id].observe(promised(draft), len(path))

    def expected(self, entry: TargetSession) -> float:
        """Draft tokens of a session that the next step can expect to accept, of those that are there."""
        draft = self._candidates(entry, self._min_probability)
        return min(self.calibrations[entry.session.id].ratio, 1.0) * promised(draft)

    def wanted(self, entry: TargetSession) -> int:
        """Draft tokens that the next step could verify with profit, judged by this one: none, one to try, or all."""
        if not self.serves(entry.session):
            return 0
        most = self._planner.most(entry.session)
        calibration = self.calibrations[entry.session.id]
        if self._planner.verifies_all or min(calibration.ratio, 1.0) > self._min_probability:
            return most
        return min(int(calibration.due), most)

    def budget(self, entry: TargetSession, *, paused: bool, unread: bool, fed: bool) -> int:
        """The draft budget of a session's next step, which its commit carries to drafters.

        paused: drafting is, of all sessions. unread: no drafter has read this session, as far as is known; a few last
        tokens are not worth the reading. fed: drafters read hidden states, of which a paused one may have those of the
        prompt.
        """
        session = entry.session
        ratio = _READ_PER_TOKEN if fed else _READ_PER_TOKEN_ALONE
        late = unread and session.length > ratio * self._planner.room(session) and (session.drafting.paused or not fed)
        session.drafting.paused = paused or late
        return 0 if session.drafting.paused else self.wanted(entry)

    def count_misses(self, works: Sequence[SessionWork], *, paused: bool) -> None:
        """Count sessions that sample without a draft token. paused: drafting is."""
        if not self.stats.started:
            return
        missing = [work.chunk.session for work in works if work.chunk.last and not work.draft]
        if paused:
            self.stats.paused(sum(session.length > session.opened_length for session in missing))
            return
        for session in missing:
            self.stats.missed(session, self._sessions[session.id].tree)
