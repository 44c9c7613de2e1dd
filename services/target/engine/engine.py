"""The target's engine: every step verifies the draft tokens that are there, and commits at least one token per session.

    1. plan     the sessions that take part, their committed tokens, and the draft tokens to verify (speculation/)
    2. launch   one forward pass over all tokens of all sessions, and a sample after each root and draft token
                (launching/)
    3. collect  wait for the samples
    4. settle   walk along them, commit, compact the cache, end what has ended (settlement.py)

On CUDA, messages are taken in between launch and collect. Where no session has draft tokens, grammar or penalties,
the next step is launched before this one is collected (launching/in_flight.py).

A step verifies the draft tokens that are there when it begins; it is held for proposals only where that pays
(speculation/draft_wait.py). Without draft tokens it is plain decoding. A session at or past its limit of tokens is
refused when it opens: nothing is left to commit, and its finish was reported before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.config import TargetConfig
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureSpec
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, StepOutput
from outrider.serving.scheduler import Scheduler
from outrider.speculation.proposal import Commit, Proposal
from services.target.engine import commits
from services.target.engine.launching.in_flight import InFlightStep
from services.target.engine.launching.launcher import Launcher
from services.target.engine.limits import open_modes, scheduling, thresholds
from services.target.engine.memory import plan_memory
from services.target.engine.observers import Observers
from services.target.engine.sessions import OpenSessions
from services.target.engine.settlement import Settlement
from services.target.features.features import Features
from services.target.features.fusion import Fusion
from services.target.model.base import Model
from services.target.sampling.session import TargetSession
from services.target.sampling.step_sampler import StepSampler
from services.target.speculation.controller import Speculation, speculation_of
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.planner import Planner
from services.target.speculation.plans import StepPlan, Timing

log = logging.getLogger(__name__)

_GRAMMAR_WAIT = 0.01  # seconds that a step without work waits for a grammar


class TargetEngine(Engine):
    """Sessions, pages and draft trees around a loaded model.

    overlap: steps are launched before the one before them is read
    """

    def __init__(
        self, model: Model, config: TargetConfig, modes: Sequence[SpeculationMode] = tuple(SpeculationMode)
    ) -> None:
        """modes: speculation modes to choose among. Raises ConfigError for limits that cannot be met."""
        config.check()
        self.model = model
        pages = plan_memory(model, config).pages
        self.cache = model.new_cache(pages, config.page_size)
        prefix = PrefixCache(PageAllocator(pages, config.page_size), enabled=not config.disable_radix_cache)
        self.scheduler = Scheduler(prefix, scheduling(config, model.vocab_size, model.device))
        longest = min(model.context_length, pages * config.page_size)
        self.features = Features(model, prefix, config.feature_cache_bytes)
        sampler = StepSampler(model, self.cache, thresholds(config))
        self.sessions = OpenSessions(model, self.scheduler, self.features, longest, self._ended)
        window = config.coalesce_seconds if sampler.alongside else 0.0
        planner, opened = Planner(config, self.scheduler, longest), open_modes(modes, config, model)
        self.speculation: Speculation = speculation_of(
            model, self.cache, prefix, self.features, config, planner, self.sessions.by_id, window, opened
        )
        parts = self.features, self.sessions, self.speculation
        self._settlement = Settlement(model, self.cache, *parts, self.close)
        self.overlap = model.device.type == "cuda" and not config.disable_overlap_schedule
        self.launcher = Launcher(
            model, self.cache, sampler, self.features, self.scheduler, self.speculation, self.sessions.by_id,
            overlap=self.overlap,
        )  # fmt: skip
        self._in_flight: InFlightStep | None = None
        self._pending = StepOutput()  # of sessions that were ended, or of a step that was collected, between two steps
        self.observers = Observers()
        self.weight_version = config.weight_version
        self._coalesce_seconds = config.coalesce_seconds
        if longest < model.context_length:
            log.info("the KV cache limits sessions to %d tokens", longest)

    def open(self, request: OpenSession) -> None:
        """Open a session. Raises InvalidRequest; also for one that has its max_tokens already."""
        self.sessions.open(request)
        self.speculation.opened(request.session_id)

    def close(self, session_id: int) -> None:
        """Close a session and free its pages."""
        self.sessions.close(session_id)

    def _ended(self, entry: TargetSession) -> None:
        self.speculation.closed(entry)
        self.observers.ended(entry.session)

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """Merge proposals. Those with tokens that the model does not know are dropped."""
        assert not commits, "commits come from the target"
        for proposal in proposals:
            self.speculation.receive(proposal)

    def configure_features(self, spec_id: int, spec: FeatureSpec, content: bytes) -> Fusion:
        """As `Features.configure`; steps that return these features are captured as soon as there is time."""
        fusion = self.features.configure(spec_id, spec, content)
        self.launcher.captures.expect(fusion.layers, final=fusion.final)
        return fusion

    def forget_measurements(self) -> None:
        """Drop what sessions have taught and left behind; those of the warm-up are no example."""
        self.flush()
        self.speculation.forget()
        self.launcher.step_tokens = 0

    # --- control: see process/control.py ---

    def abort(self) -> int:
        """End all sessions. Returns their number."""
        self.finish()
        self._note_weights()
        entries = list(self.sessions.by_id.items())
        for session_id, entry in entries:
            self._pending.commits.append(commits.aborted(entry))
            self.close(session_id)
        return len(entries)

    def flush(self) -> None:
        """Drop cached prefixes and their features. What open sessions hold stays."""
        self.scheduler.prefix.flush()
        self.features.forget()

    def finish(self) -> None:
        """Collect the step in flight, if there is one; the next step returns its output."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._note_weights()
            self._collect(step, self._pending)

    def _note_weights(self) -> None:
        """Pending output is of the present weights."""
        if not self._pending.has_output:
            self._pending.load = self.load()

    @property
    def idle(self) -> bool:
        """True if there is nothing to do, or nothing may be done."""
        if self._pending.has_output or self._in_flight:
            return False
        return self.scheduler.held or not (self.sessions.by_id or self.launcher.captures.pending)

    @property
    def in_flight(self) -> bool:
        """True if a step was launched and not yet collected."""
        return self._in_flight is not None

    @property
    def draft_wait(self) -> float:
        """Seconds for which the next step may still be held for proposals, where that pays.

        With a step in flight: until the host must launch the next one, if that one is prepared.
        """
        step = self._in_flight
        if step is None:
            return self.speculation.policy.wait.remaining
        if (
            self.model.device.type == "cpu" or not self.launcher.prepares_next
        ):  # a CPU has computed it when the launch returns
            return 0.0
        clock = self.launcher.clock
        return max(0.0, clock.due(clock.began(step.started), step.plan.expected_seconds) - time.perf_counter())

    @property
    def coalesce_seconds(self) -> float:
        """The coalescing window, in seconds."""
        return self._coalesce_seconds

    def step(self) -> StepOutput:
        """Compute one batch and commit its tokens; with overlap, launch a step, or collect the one in flight."""
        if self._pending.has_output:
            pending, self._pending = self._pending, StepOutput()
            return replace(pending, load=replace(self.load(), weight_version=pending.load.weight_version), urgent=True)
        if self._in_flight is None and (
            self.launcher.captures.ready or (self.launcher.captures.pending and not self.sessions.by_id)
        ):
            self.launcher.captures.proceed()
            self.launcher.clock.read = time.perf_counter()  # the time is not that of a step
        if not self.sessions.by_id and self._in_flight is None:
            return StepOutput(load=self.load())
        present = self.scheduler.running + self.scheduler.waiting
        since = None if self._in_flight is None else self.launcher.clock.began(self._in_flight.started)
        self.speculation.begin(min(present, self.scheduler.limits.max_running), since)
        output = StepOutput(failures=self.sessions.begin())
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._in_flight = self.launcher.launch_behind(step, self.plan, self.message_files)
            self._collect(step, output)
        elif (step := self.launcher.launch(self.plan(), self.message_files)) is None:
            self.sessions.grammars.wait(_GRAMMAR_WAIT)
        elif self.overlap:  # messages that arrive while the device computes are taken in before this is collected
            self._in_flight = step
        else:
            self._collect(step, output)
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
            step_tokens=self.launcher.step_tokens,
            cached_pages=allocator.cached_pages,
            preemptions=self.scheduler.preemptions,
            weight_version=self.weight_version,
            drafting_paused=self.speculation.policy.drafting_paused,
            draft_stats=self.speculation.service.stats.load(),
            paused=self.scheduler.held,
        )

    def check(self) -> None:
        """Audit the pages. Raises EngineFault."""
        self.scheduler.check()
        if self.idle:
            self.observers.idle()

    # --- 1. plan; for 2. launch, see launching/launcher.py ---

    def plan(self, *, drafts: bool = True) -> StepPlan | None:
        """What the next step computes; None if there is nothing to do. drafts: draft tokens may be verified."""
        works = self.speculation.planner.plan()
        if not works:
            return None
        return self.speculation.plan(works, self.message_files, program=not self.overlap, drafts=drafts)

    # --- 3. collect, 4. settle ---

    def _collect(self, step: InFlightStep, output: StepOutput) -> None:
        behind = self._in_flight
        works, samples = step.read(self.sessions.by_id, behind)
        self.features.step = step.features
        before = len(output.commits)
        leases = {} if behind is None else behind.leases
        accepted = self._settlement.settle(step.plan, works, samples, output, leases)
        if behind is not None and leases:
            self.speculation.count_misses(behind.remaining(self.sessions.by_id))
        now = time.perf_counter()
        self.observers.settled(works, output.commits[before:], samples.model_steps, step.started, now)
        clock = self.launcher.clock
        waited = max(step.started - clock.read, 0.0)
        seconds = (now - clock.began(step.started)) / samples.steps
        if step.started < clock.read:
            clock.collected(seconds, step.plan.expected_seconds)
        step.plan.finish(works, accepted, Timing(waited, seconds, samples.model_steps))
        clock.read = now
