"""The target's engine: every step verifies the hints that are there, and commits at least a token a session.

    1. plan     which sessions take part, with which committed tokens; the best hints of those that reach their root
    2. launch   all rows of all sessions through the model, in one pass, and a token drawn after each root and node
    3. collect  wait for the draws
    4. settle   walk along them, commit, compact the cache, end what has ended

On CUDA, messages are taken in between launch and collect, and where nobody has hints or special wishes, the next step
is launched before this one is collected (in_flight.py).

Hints are taken as they lie when a step begins, held for a moment where that pays (draft_wait.py); without any, a step
is plain decoding. A session is refused when it opens at or past its limit of tokens, for there is nothing left to
commit and its finish was said before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.config import TargetConfig
from outrider.errors import EngineFault
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, StepOutput
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session
from outrider.speculation.proposal import Commit, FinishReason, Proposal
from outrider.speculation.tree import SpeculationTree
from outrider.tracing import Tracing
from services.target.engine import commits, spans
from services.target.engine.in_flight import InFlightStep, expecting, undemanding
from services.target.engine.limits import check_limits, scheduling, thresholds, weighed
from services.target.engine.sessions import Sessions
from services.target.engine.verifier import StepOutcome, settle
from services.target.features.features import Features
from services.target.kernels.kv_cache import pages_that_fit
from services.target.model.base import Model
from services.target.sampling.compaction import Moves
from services.target.sampling.sampling import StepSampler, StepSamples
from services.target.sampling.session import TargetSession
from services.target.speculation.budget import promised
from services.target.speculation.draft_stats import DraftStatsRecorder
from services.target.speculation.draft_wait import AS_LONG_AS_IT_TAKES, DraftWait
from services.target.speculation.mode_selector import DRAFT_MODES, SpeculationMode
from services.target.speculation.multi_step import MultiStepPlanner
from services.target.speculation.planner import Planner
from services.target.speculation.sources.self_speculation import SelfSpeculation, self_draft
from services.target.step.batch import SessionWork, build

log = logging.getLogger(__name__)

_GRAMMAR_WAIT = 0.01  # seconds that a step without work waits for a grammar


class TargetEngine(Engine):
    """Sessions, pages and the speculation trees around a loaded model."""

    def __init__(
        self, model: Model, config: TargetConfig, ways: Sequence[SpeculationMode] = tuple(SpeculationMode)
    ) -> None:
        """ways: those of working that are weighed. Raises ConfigError for limits that cannot be met."""
        check_limits(config)
        self.model = model
        pages = pages_that_fit(
            model.token_bytes,
            config.page_size,
            config.max_total_tokens,
            config.mem_fraction_static,
            model.device,
        )
        self.cache = model.new_cache(pages, config.page_size)
        prefix = PrefixCache(PageAllocator(pages, config.page_size), enabled=not config.disable_radix_cache)
        self.scheduler = Scheduler(prefix, scheduling(config, model.vocab_size, model.device))
        self.max_session_tokens = min(model.context_length, pages * config.page_size)
        self.features = Features(model, prefix, config.feature_cache_bytes)
        self._drawing = StepSampler(model, self.cache, self.features, thresholds(config))
        self.sessions = Sessions(model, self.scheduler, self.features, self.max_session_tokens, self._ended)
        self._entries = self.sessions.entries
        self.planner = Planner(config, self.scheduler, self.max_session_tokens, self._entries)
        at_once = config.coalesce_seconds if self._drawing.alongside else 0.0
        self.bursts = MultiStepPlanner(self.planner, self.scheduler, self._entries, at_once)
        parts = self.planner, self.scheduler, self._entries
        self.own = SelfSpeculation(self_draft(model, self.cache, prefix, *parts), *parts)
        self.hinted_only = False  # whatever measurements say
        self.overlap = model.device.type == "cuda" and config.tp_size == 1 and not config.disable_overlap_schedule
        self._flight: InFlightStep | None = None  # the step under way
        self._unsaid = StepOutput()  # what came of it, or of sessions that were ended from outside, between two steps
        self.tracing: Tracing | None = None  # where spans of sessions go
        self.weight_version = config.weight_version
        self._step_tokens = 0
        self._collected = 0.0  # when the last step was, by the clock
        self._gather_seconds = config.coalesce_seconds
        self._ways = weighed(ways, config, model)
        self._longest = AS_LONG_AS_IT_TAKES if config.speculative_always else None
        self._patience = self._new_patience()
        self._record = DraftStatsRecorder()
        if self.max_session_tokens < model.context_length:
            log.info("the KV cache limits sessions to %d tokens", self.max_session_tokens)

    def _new_patience(self) -> DraftWait:
        return DraftWait(self._ways, longest=self._longest, dear=self._trees_are_dear)

    def _trees_are_dear(self) -> bool:
        return self.features.asked and self.planner.budget.trees_are_dear

    def open(self, request: OpenSession) -> None:
        """Take a session on. Raises InvalidRequest; also for one that has its max_tokens already."""
        self.sessions.open(request)
        self.planner.calibrations.open(request.session_id)

    def close(self, session_id: int) -> None:
        """Forget a session and free its pages."""
        self.sessions.close(session_id)

    def _ended(self, entry: TargetSession) -> None:
        self._patience.forget(entry.session.id)
        self._record.ended(entry.session.id, entry.tree)
        if self.tracing is not None and entry.session.traceparent:
            spans.tell(self.tracing, entry.session)
        self.planner.calibrations.close(entry.session.id)
        self.own.close(entry.session.id)

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """Merge hints. Those with tokens that the model does not know are dropped."""
        assert not commits, "the target is not told of commits"
        for proposal in proposals:
            entry = self._entries.get(proposal.session_id)
            if entry is None:
                continue
            self._patience.answered(proposal.session_id, proposal.committed_length >= entry.session.length)
            known, held = 0, len(entry.tree)
            if len(proposal.tokens) and int(proposal.tokens.max()) < self.model.vocab_size:
                known = entry.tree.merge(proposal)
            self._record.came(proposal, entry.session.length, len(entry.tree) - held, known)

    def draft_tree(self, session_id: int) -> SpeculationTree:
        """The speculation tree of a session that is open."""
        return self._entries[session_id].tree

    def forget_measurements(self) -> None:
        """Begin anew with what sessions taught and left behind; the warm-up's own are no example."""
        self.flush()
        self.planner.calibrations.forget()
        self._record = DraftStatsRecorder()
        self._patience = self._new_patience()
        self.own.forget()
        self._step_tokens = 0

    # --- control: see process/control.py ---

    def abort(self) -> int:
        """End all sessions. Returns how many there were."""
        self.finish()
        self._note_weights()
        entries = list(self._entries.items())
        for session_id, entry in entries:
            self._unsaid.commits.append(commits.aborted(entry))
            self.close(session_id)
        return len(entries)

    def flush(self) -> None:
        """Forget cached prefixes and what is kept with them. What sessions hold stays theirs."""
        self.scheduler.prefix.flush()
        self.features.forget()

    def finish(self) -> None:
        """Collect the step under way, if there is one; the next one tells what it said."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._note_weights()
            self._collect(flight, self._unsaid)

    def _note_weights(self) -> None:
        """What is told later is of the weights that are here now."""
        if not self._unsaid.has_output:
            self._unsaid.load = self.load()

    @property
    def idle(self) -> bool:
        """True if there is nothing to do, or nothing may be done."""
        return not (self._unsaid.has_output or self._flight) and (self.scheduler.held or not self._entries)

    @property
    def patience(self) -> float:
        """Seconds that the next step may still be held for hints, where that pays."""
        return 0.0 if self._flight else self._patience.remaining

    @property
    def coalesce_seconds(self) -> float:
        """Seconds in which tokens gather that only clients wait for."""
        return self._gather_seconds

    def step(self) -> StepOutput:
        """Compute one batch and commit what it says; where steps overlap, launch one, or commit the one under way."""
        if self._unsaid.has_output:
            unsaid, self._unsaid = self._unsaid, StepOutput()
            return replace(unsaid, load=replace(self.load(), weight_version=unsaid.load.weight_version), urgent=True)
        self._patience.begin(min(self.scheduler.running + self.scheduler.waiting, self.scheduler.limits.max_running))
        output = StepOutput(failures=self.sessions.begin())
        flight, self._flight = self._flight, None
        if flight is not None:
            self._flight = self._launch_behind(flight)
            self._collect(flight, output)
        elif (flight := self._launch(self._plan())) is None:
            self.sessions.grammars.wait(_GRAMMAR_WAIT)
        elif self.overlap:  # what arrives while the device computes is taken in before this is collected
            self._flight = flight
        else:
            self._collect(flight, output)
        output.load = self.load()
        return output

    def load(self) -> EngineLoad:
        """Sessions and pages at present."""
        allocator = self.scheduler.allocator
        return EngineLoad(
            running_sessions=self.scheduler.running,
            waiting_sessions=self.scheduler.waiting,
            free_pages=allocator.free_pages,
            total_pages=allocator.total_pages,
            step_tokens=self._step_tokens,
            cached_pages=allocator.cached_pages,
            preemptions=self.scheduler.preemptions,
            weight_version=self.weight_version,
            drafting_paused=self._unwanted,
            draft_stats=self._record.load(),
            paused=self.scheduler.held,
        )

    def check(self) -> None:
        """Audit the pages. Raises EngineFault."""
        self.scheduler.check()

    # --- 1. plan ---

    def _plan(self, *, hints: bool = True) -> Sequence[SessionWork]:
        works: Sequence[SessionWork] = self.planner.plan(hints=hints and not self._by_itself and not self._unwanted)
        if self._by_itself:
            alone = self._may_burst and not self.features.asked and self.bursts.alone(works)
            guessing, seconds = (
                self._patience.way is SpeculationMode.SELF_SPECULATE,
                self.bursts.seconds if alone else 0.0,
            )
            works = self.own.extend(works, self.message_files, guessing=guessing, seconds=seconds)
        self.planner.count_misses(works, self._record, unwanted=self._unwanted)
        return works

    @property
    def _by_itself(self) -> bool:
        """Steps verify drafts of the target's own, where they pay."""
        return self.model.prompt_lookup and self._patience.way not in DRAFT_MODES and not self.hinted_only

    @property
    def _unwanted(self) -> bool:
        """Drafters are told that no hints are wanted."""
        return self._patience.unwanted

    # --- 2. launch ---

    def _launch(
        self, works: Sequence[SessionWork], behind: InFlightStep | None = None, drawn: Sequence[Session] = ()
    ) -> InFlightStep | None:
        """Start on a plan, if there is one. behind: the step under way, which draws the roots of `drawn`."""
        if not works:
            return None
        started = time.perf_counter()
        capture = self.features.capture(works, late=self._unwanted)
        bursting = works if self._may_burst else ()
        with self.bursts.planned(bursting, self.message_files, self._same(bursting), self.own.take_rounds()) as burst:
            batch = build(works, self.model.device, capture, self._drawing.plan(works, self._entries), burst)
            if behind is not None:
                batch = behind.roots(batch, works, drawn)
            self._step_tokens = len(batch)
            flight = InFlightStep(works, self._drawing.launch(batch, works, self._entries), started)
        self.own.computed(works)
        for work in works:
            work.chunk.session.computed = work.chunk.stop + flight.steps - 1
        return flight

    def _same(self, works: Sequence[SessionWork]) -> int:
        """How many last tokens of a session must have stood in its text before for a burst to end there."""
        if not works or not self._by_itself:
            return 0
        return self.own.least(len(works), sum(work.chunk.stop for work in works))

    @property
    def _may_burst(self) -> bool:
        return not self.overlap and self._patience.unhinted and (self._unwanted or not self.features.asked)

    def _launch_behind(self, flight: InFlightStep) -> InFlightStep | None:
        """Launch the next step before this one is read, unless it could gain by what this one says."""
        entries = self._entries.values()
        if not flight.plain or self.features.asked or not all(map(self._foreseeable, entries)):
            return None
        drawn = [session for session in flight.drawing(self._entries) if self.planner.room(session) > 1]
        with expecting(drawn):
            return self._launch(self._plan(hints=False), flight, drawn) if self.scheduler.fits() else None

    def _foreseeable(self, entry: TargetSession) -> bool:
        hinted = self._patience.drafted(entry.session.id) and not self._unwanted and self.planner.wanted(entry)
        return undemanding(entry) and not hinted

    # --- 3. collect ---

    def _collect(self, flight: InFlightStep, output: StepOutput) -> None:
        works, draws = flight.read(self._entries, self._flight)
        self._settle(works, draws, output)
        now = time.perf_counter()
        if not any(work.own for work in works) and not draws.rounds:
            self.planner.budget.waited(max(flight.started - self._collected, 0.0))
        if not draws.rounds:
            seconds = (now - max(flight.started, self._collected)) / draws.steps
            self.planner.budget.cost.observe(flight.tokens, flight.keys, seconds)
        if draws.turns > 1 and self._record.begun:
            self._record.rested((draws.turns - 1) * len(works))
        self._collected = now

    # --- 4. settle ---

    def _settle(self, works: Sequence[SessionWork], draws: StepSamples, output: StepOutput) -> None:
        moves = Moves()
        hushed: list[Commit] = []
        first = 0
        urgent = False
        for work in works:
            session, draft = work.chunk.session, work.draft
            if session.to_score:
                session.scored = min(max(session.scored, work.chunk.stop), session.to_score)
            if not work.chunk.last:
                self.features.settle(work, (), goes_on=True)
                if self._unwanted and self.features.asked and not session.drafting_paused:
                    hushed.append(commits.hush(self._entries[session.id]))
                continue
            behind = first + len(draft.tokens) + 1
            sampled, first = draws.of(first, behind), behind
            entry = self._entries[session.id]
            try:
                verdict = settle(draft, sampled, entry.stop_ids, self.planner.room(session))
            except EngineFault as fault:
                output.failures += self.sessions.stuck(work, fault)
                continue
            goes_on = verdict.reason == FinishReason.RUNNING
            has_output: list[Commit] = []
            if draws.rounds:
                self.own.learn(session, draws.rounds, goes_on=goes_on)
                has_output, rest = commits.of_earlier_rounds(entry, draws.rounds, verdict.tokens)
                verdict = verdict._replace(tokens=rest)
            self.features.settle(work, verdict.path, goes_on=goes_on)
            if goes_on and verdict.path and not draws.moved:
                moves.add(session, verdict.path)
            has_output.append(self._commit(entry, work, verdict, draws))
            output.commits += has_output
            urgent = urgent or any(self._is_urgent(commit, session) for commit in has_output)
        moves.make(self.cache, self.model.device)
        committed = sum(len(commit.tokens) for commit in output.commits)
        if not any(work.own for work in works):
            drafts = [work.draft for work in works if len(work.draft.tokens)]
            accepted = sum(commit.accepted for commit in output.commits) if drafts else 0
            self.planner.calibrations.overall.observe(sum(map(promised, drafts)), accepted)
        waited_for = [commit.session_id for commit in output.commits if commit.draft_budget]
        prompts = sum(len(work.chunk) for work in works) - len(works)  # a root a session is no part of them
        count = len(output.commits) - max(len(draws.rounds) - 1, 0)  # of sessions
        self._patience.end(waited_for, count, committed, prompts=prompts, steps=draws.turns)
        output.steps = draws.turns
        output.commits += hushed
        output.features = self.features.flush(late=self._unwanted)
        output.urgent = urgent or bool(output.failures or (output.features and not self._unwanted))

    def _is_urgent(self, commit: Commit, session: Session) -> bool:
        """True for the first commit of a session and the last, and for one that a drafter waits for."""
        begins, ends = commit.base_length == session.opened_length, commit.finish_reason != FinishReason.RUNNING
        return begins or ends or (commit.draft_budget > 0 and self._patience.drafted(session.id))

    def _commit(self, entry: TargetSession, work: SessionWork, verdict: StepOutcome, draws: StepSamples) -> Commit:
        session, tree, draft = entry.session, entry.tree, work.draft
        calibration = self.planner.calibrations[session.id]  # a session that ends is closed below
        base = session.length
        told = draws.logprobs(entry, verdict.path, len(verdict.tokens))
        held = len(tree)
        entry.append(verdict.tokens)
        self._record.unverified += held - (0 if work.own else len(draft.tokens)) - len(tree)
        if verdict.reason == FinishReason.RUNNING:
            session.computed = max(session.computed, session.length - 1)
            session.table.truncate(session.length)
        else:
            self.close(session.id)
        verified, accepted = len(draft.tokens), len(verdict.path)
        goes_on = verdict.reason == FinishReason.RUNNING
        if draws.rounds:
            verified, accepted = draws.rounds[-1].nodes, draws.rounds[-1].accepted
        elif not work.own:
            calibration.observe(promised(draft), accepted)
        elif len(draft.tokens):
            self.own.observe(session.id, draft, verdict.path, goes_on=goes_on)
        unread = self.features.asked and not self._patience.drafted(session.id)
        wanted = self.planner.tell(entry, unwanted=self._unwanted, unread=unread) if goes_on else 0
        commit = Commit(
            session.id, base, verdict.tokens, tree.root_hash, verified, accepted, verdict.reason,
            draft_budget=wanted, logprobs=told,
        )  # fmt: skip
        return commit if base > session.opened_length else commits.first(commit, entry)
