"""The engine's one counterpart for speculation: what a step verifies, and what is learned from it.

receive    a proposal is merged into its session's draft tree
plan       the mode policy decides whether proposals are verified; the target's own sources may draft without them;
           without any draft tokens, several plain steps may follow one another
settled    a step has ended: costs, acceptance and modes are updated
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from outrider.config import TargetConfig
from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import MessageWatch
from outrider.serving.session import Session
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import Commit, Proposal
from outrider.speculation.tree import TreeSlice
from services.target.features.features import Features
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.sampling.session import TargetSession
from services.target.speculation.allowed import AllowedSources
from services.target.speculation.chooser import SourceChooser, model_source
from services.target.speculation.draft_wait import MEASURING_WAIT
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.modes.policy import ModePolicy
from services.target.speculation.multi_step import MultiStepPlanner
from services.target.speculation.planner import Planner, last_chunks
from services.target.speculation.plans import PlanMaker, ServiceStep, StepPlan
from services.target.speculation.sources.base import Demand, Drafts
from services.target.speculation.sources.draft_service import DraftService
from services.target.speculation.survivors import room_for
from services.target.step.batch import SessionWork
from services.target.step.prepared import TreeTables

_FEW_SESSIONS = 4  # whose surviving draft tokens are weighed: one of many usually has none


class Speculation:
    """Decides for one engine.

    allowed: which draft sources the open sessions allow
    service_only: the draft service's proposals are verified in every step; for the warm-up
    """

    def __init__(
        self,
        config: TargetConfig,
        planner: Planner,
        sessions: Mapping[int, TargetSession],
        service: DraftService,
        chooser: SourceChooser | None,
        multi_step: MultiStepPlanner,
        modes: Sequence[SpeculationMode],
        features: Features,
    ) -> None:
        """sessions: those that are open, by id. chooser: None for a model without draft sources of its own.

        modes: those to choose among; the first one begins
        """
        self.planner, self.service, self.chooser, self.multi_step = planner, service, chooser, multi_step
        self.service_only = False
        self.policy: ModePolicy
        self._sessions = sessions
        self._modes, self._features = modes, features
        self._own = chooser if SpeculationMode.SELF_SPECULATE in modes else None
        self.allowed = AllowedSources(self._own.kinds if self._own is not None else frozenset())
        self._longest = MEASURING_WAIT if config.speculative_always else None
        self._plans = PlanMaker(planner, service, multi_step, sessions)
        self._start_policy()

    def _start_policy(self) -> None:
        self.policy = ModePolicy(
            self._modes,
            longest=self._longest,
            expensive=lambda: self._features.asked and self.planner.budget.trees_are_expensive,
            drafts_ahead=lambda: not self._reads_late,
        )

    @contextmanager
    def only(self, mode: SpeculationMode) -> Iterator[None]:
        """All steps have this mode. Drops what was measured of modes."""
        modes, self._modes = self._modes, [mode]
        self._start_policy()
        try:
            yield
        finally:
            self._modes = modes
            self._start_policy()

    def forget(self) -> None:
        """Drop all measurements but the cost model; those of the warm-up are no example."""
        self.service.forget()
        if self.chooser is not None:
            self.chooser.forget()
        self._start_policy()

    # --- sessions and proposals ---

    def opened(self, session_id: int) -> None:
        """A session begins."""
        self.service.opened(session_id)
        self.allowed.opened(self._sessions[session_id].session)

    def closed(self, entry: TargetSession) -> None:
        """A session has ended and returned its pages."""
        session_id = entry.session.id
        self.policy.wait.closed(session_id)
        self.service.stats.ended(session_id, entry.tree)
        self.service.closed(session_id)
        self.allowed.closed(entry.session)
        if self.chooser is not None:
            self.chooser.closed(session_id)

    def receive(self, proposal: Proposal) -> None:
        """Merge a proposal. One of a session that is not open, or allows no draft service, is dropped."""
        entry = self._sessions.get(proposal.session_id)
        if entry is not None and self.service.serves(entry.session):
            fresh = proposal.committed_length >= entry.session.length
            self.policy.wait.reads_ahead |= entry.session.length == entry.session.opened_length
            self.policy.received(
                proposal.session_id, fresh=fresh, length=proposal.committed_length, useful=len(proposal.tokens) > 0
            )
            self.service.merge(proposal, entry)

    # --- modes ---

    def begin(self, sessions: int, since: float | None = None) -> None:
        """A step begins. sessions, since: as of ModePolicy."""
        self.policy.begin(sessions, served=self.allowed.service, apart=self.allowed.service_alone, since=since)

    @property
    def _self_speculates(self) -> bool:
        """True if steps verify draft tokens of the target's own, where they pay."""
        return self.chooser is not None and self.policy.mode is SpeculationMode.SELF_SPECULATE and not self.service_only

    @property
    def without_drafts(self) -> bool:
        """True if no session has, or gets, draft tokens or features of a draft service."""
        return self.policy.without_drafts and (self.policy.drafting_paused or not self._features.captures)

    @property
    def prepares(self) -> bool:
        """True if the next step verifies what has arrived, without waiting for more, and no flags shape its trees."""
        ready = self.policy.mode is SpeculationMode.DRAFT_IF_READY and not self.service_only
        return ready and self._own is None and not self.planner.shapes

    def wants_drafts(self, entry: TargetSession) -> bool:
        """True if the next step may verify proposals for a session."""
        drafted = self.policy.wait.drafts_for(entry.session.id) and not self.policy.drafting_paused
        return drafted and bool(self.service.wanted(entry))

    # --- plans ---

    def plan(
        self, works: Sequence[SessionWork], listen: MessageWatch, *, program: bool, drafts: bool = True
    ) -> StepPlan:
        """What a step verifies of some sessions.

        listen: how a message interrupts drafting. program: several steps may follow within one call. drafts: draft
        tokens may be verified
        """
        demand = _demand(works)
        self.service.begin(demand)
        alone = program and self.without_drafts and self.multi_step.alone(works)
        if self._self_speculates and self.chooser is not None:
            loops = alone and not self._features.captures
            plan = self._plans.self_drafted(works, listen, self.chooser, alone=alone, loops=loops)
        else:
            own = self._own if drafts and not self.service_only else None
            if drafts and not self.policy.drafting_paused:
                rival = own.source if own is not None else None
                works = _with_drafts(works, self.service.draft(replace(demand, rival=rival), listen))
            if own is not None:
                plan = self._plans.mixed(works, listen, own)
            else:
                plan = self._plans.plain(works, alone=alone and not any(work.draft for work in works))
        self.count_misses(plan.works)
        return plan

    def count_misses(self, works: Sequence[SessionWork]) -> None:
        """Count sessions that a step samples for without a draft token."""
        self.service.count_misses(works, paused=self.policy.drafting_paused)

    def plan_prepared(
        self, works: Sequence[SessionWork], tables: TreeTables, sessions: Sequence[Session], reaches: Sequence[int]
    ) -> StepPlan:
        """A step behind one in flight, whose draft tokens the device chooses. Fills in the room that tables lack.

        tables: of the trees of `sessions`, which have pages for all that the step in flight may accept, `reaches`
        """
        demand = _demand(works)
        self.service.begin(demand)
        rooms = self.service.room(tables, sessions, demand)
        room: dict[int, tuple[TreeSlice, int]] = {}
        for one, (session, reach, tokens) in enumerate(zip(sessions, reaches, rooms, strict=True)):
            tables.sessions[3, one] = count = self.planner.reserve_room(session, session.length + reach, tokens)
            room[session.id] = room_for(count), reach
        prepared = []
        for work in works:
            draft, most = room.get(work.chunk.session.id, (work.draft, None))
            prepared.append(replace(work, draft=draft, reach=most))
        return ServiceStep(prepared, self.service, self.planner.budget)

    def launched(self, works: Sequence[SessionWork]) -> None:
        """A step of the model is launched, which writes these tokens into the cache."""
        if self.chooser is not None:
            self.chooser.launched(works)

    # --- outcomes ---

    def budget(self, entry: TargetSession) -> int:
        """The draft budget of a session's next step, for its commit."""
        fed = self._features.asked
        unread = (fed or self._reads_late) and not self.policy.wait.drafts_for(entry.session.id)
        return self.service.budget(entry, paused=self.policy.drafting_paused, unread=unread, fed=fed)

    @property
    def _reads_late(self) -> bool:
        """True if drafters read prompts behind the first token alone, in time of the target."""
        return not self._features.asked and not self.policy.wait.reads_ahead

    def settled(self, commits: Sequence[Commit], sessions: int, prompt_tokens: int, steps: int) -> None:
        """A step has ended. sessions: that it committed tokens in; steps: of the model."""
        wanted = [commit.session_id for commit in commits if commit.draft_budget]
        tokens = sum(len(commit.tokens) for commit in commits)
        own = sum(commit.accepted for commit in commits if commit.source != SourceKind.DRAFT)
        unread = {}
        if self._reads_late:
            unread = {one: self._sessions[one].session.length for one in wanted if not self.policy.wait.drafts_for(one)}
        served = [commit for commit in commits if commit.source == SourceKind.DRAFT and commit.verified]
        self.policy.end(
            wanted, sessions, tokens, prompts=prompt_tokens, steps=steps, own=own, unread=unread,
            drafted=len(served), accepted=sum(commit.accepted for commit in served),
        )  # fmt: skip
        if not prompt_tokens and wanted:
            self._wait_where_it_pays(commits, wanted, tokens)
        lengths = {one.session_id: one.base_length + len(one.tokens) for one in commits if one.draft_budget}
        self.policy.asked(lengths, [one for one in wanted if self._sessions[one].tree])

    def _wait_where_it_pays(self, commits: Sequence[Commit], wanted: Sequence[int], tokens: int) -> None:
        """Let the next step wait only for sessions whose answers are expected to be worth it."""
        wait = self.policy.wait
        served = {one.session_id: one.accepted for one in commits if one.source == SourceKind.DRAFT and one.verified}
        own = [one.accepted for one in commits if one.session_id not in served]
        wait.gain.committed(wait.now, served, tokens, own)
        if self.planner.verifies_all or wait.reads or not wait.remaining:
            return
        entries = [self._sessions[one] for one in wanted]
        few = len(entries) <= _FEW_SESSIONS
        promised = {one.session.id: self.service.expected(one) if few else 0.0 for one in entries if one.tree}
        wait.weigh(promised, self.policy.pace.seconds)


def _with_drafts(works: Sequence[SessionWork], drafts: Drafts) -> Sequence[SessionWork]:
    """Work with the draft tokens of its sessions."""
    return [replace(work, draft=drafts.get(work.chunk.session.id, work.draft)) for work in works] if drafts else works


def _demand(works: Sequence[SessionWork]) -> Demand:
    """All sessions of a step."""
    chunks = last_chunks(works)
    return Demand(works, len(chunks), sum(len(work.chunk) for work in works), sum(work.chunk.stop for work in works))


def speculation_of(
    model: Model,
    cache: KVCache,
    prefix: PrefixCache,
    features: Features,
    config: TargetConfig,
    planner: Planner,
    sessions: Mapping[int, TargetSession],
    window: float,
    modes: Sequence[SpeculationMode],
) -> Speculation:
    """The speculation of an engine, with the draft sources that its model has. window: as of MultiStepPlanner."""
    chooser = None
    if model.prompt_lookup:
        chooser = SourceChooser(planner, sessions, model_source(model, cache, prefix, planner, sessions))
    service = DraftService(planner, sessions, model.vocab_size)
    return Speculation(
        config, planner, sessions, service, chooser, MultiStepPlanner(planner, sessions, window), modes, features
    )
