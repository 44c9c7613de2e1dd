"""Launches steps: a plan becomes a batch, and the device starts on it; on CUDA, also behind a step in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from outrider.serving.loop import MessageWatch
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session
from services.target.engine.launching.in_flight import InFlightStep, expecting, needs_only_length
from services.target.engine.launching.launch_clock import LaunchClock
from services.target.engine.launching.prepare import prepare, takes_prepared_spans
from services.target.features.features import Features
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.model.cuda.step_captures import StepCaptures
from services.target.sampling.samples import LaunchedStep
from services.target.sampling.session import TargetSession
from services.target.sampling.step_sampler import StepSampler
from services.target.speculation.controller import Speculation
from services.target.speculation.plans import StepPlan
from services.target.step.batch import Batch, SessionWork, build
from services.target.step.prepared import PreparedSpans, TreeTables
from services.target.step.upload import use_device


class Launcher:
    """Launches the steps of one engine.

    prepares: the device chooses the draft tokens of steps behind others
    clock: of launches and of the device. step_tokens: of the last step
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        sampler: StepSampler,
        features: Features,
        scheduler: Scheduler,
        speculation: Speculation,
        entries: Mapping[int, TargetSession],
        *,
        overlap: bool,
    ) -> None:
        """entries: the open sessions, by id. overlap: steps are launched behind others."""
        self.sampler = sampler
        self.captures = StepCaptures(model.runner)
        self.clock = LaunchClock()
        self.step_tokens = 0
        self.model, self._cache, self._features, self._scheduler = model, cache, features, scheduler
        self._speculation, self._entries = speculation, entries
        # Steps behind draft tokens overlap, too, where the device can choose the next ones.
        self._follows = takes_prepared_spans(model.runner)
        self.prepares = overlap and sampler.exact and self._follows

    @property
    def prepares_next(self) -> bool:
        """True if draft tokens that arrive before the next launch may be verified by a prepared step."""
        wants = self._speculation.wants_drafts
        return self.prepares and self._speculation.prepares and any(map(wants, self._entries.values()))

    def launch(
        self,
        plan: StepPlan | None,
        listen: MessageWatch,
        behind: InFlightStep | None = None,
        sampled: Sequence[Session] = (),
        tables: TreeTables | None = None,
    ) -> InFlightStep | None:
        """Start on a plan, if there is one. listen: how a message ends a step of several early.

        behind: the step in flight, which samples the roots of `sampled`. tables: of the trees of `sampled`, for a
        prepared step
        """
        if plan is None:
            return None
        started = time.perf_counter()
        works = plan.works
        capture = self._features.capture(works, deferred=self._speculation.policy.drafting_paused)
        with plan.program(listen) as program:
            batch = build(works, self.model.device, capture, self.sampler.plan(works, self._entries), program)
            prepared = None
            if behind is not None and tables is not None:
                samples = behind.launched.tokens
                batch, prepared = prepare(batch, works, sampled, samples, tables, follows=self._follows)
            elif behind is not None:
                batch = behind.roots(batch, works, sampled)
            self.step_tokens = len(batch)
            ahead = self.prepares and self._speculation.prepares
            launched = self.compute(batch, works, prepared, ahead=ahead)
            chosen = None if tables is None else (tables, sampled)
            step = InFlightStep(plan, launched, started, prepared=chosen, features=self._features.step)
        self._speculation.launched(works)
        for work in works:
            work.chunk.session.computed = work.chunk.stop + step.launched.steps - 1
        return step

    @torch.inference_mode()
    def compute(
        self, batch: Batch, works: Sequence[SessionWork], prepared: PreparedSpans | None = None, *, ahead: bool = False
    ) -> LaunchedStep:
        """Run the model over a batch, and sample behind it. On CUDA both are launched, and nothing is waited for.

        works: of the batch, in order. prepared, ahead: as of StepSampler
        """
        use_device(self.model.device)
        outputs = self.model.runner.forward(batch, self._cache)
        self._features.take(batch, outputs.features)
        outputs = outputs._replace(features=None)  # what has taken them may free them before the sampling needs memory
        return self.sampler.sample(batch, outputs, works, self._entries, prepared, ahead=ahead)

    def launch_behind(
        self, step: InFlightStep, plan: Callable[..., StepPlan | None], listen: MessageWatch
    ) -> InFlightStep | None:
        """Launch the next step before this one is read, unless the next one needs what this one samples.

        plan: plans one, with or without draft tokens
        """
        entries = self._entries.values()
        if self.captures.ready or not all(map(needs_only_length, entries)):
            return None
        room = self._speculation.planner.room
        sampled = [session for session in step.sampling(self._entries) if room(session) > 1]
        if not step.plain or self._features.captures or any(map(self._speculation.wants_drafts, entries)):
            return self._launch_prepared(step, sampled, listen)
        with expecting(sampled):
            return self.launch(plan(drafts=False), listen, step, sampled) if self._scheduler.fits() else None

    def _launch_prepared(
        self, step: InFlightStep, sampled: Sequence[Session], listen: MessageWatch
    ) -> InFlightStep | None:
        """Launch the next step, whose draft tokens the device chooses; None if it cannot, or should not."""
        if not self.prepares or not self._speculation.prepares or not sampled:
            return None
        if step.features.deferred or not (step.plain or step.launched.moved):
            return None
        if any(session.lacking > 0 for session in sampled):  # which stop tokens are excluded depends on the length
            return None
        began = time.perf_counter()
        planner, reaches = self._speculation.planner, step.reaches(sampled)
        for session, reach in zip(sampled, reaches, strict=True):
            if not self._scheduler.reserve_spare(session, session.length + reach + 1):
                return None
        tables = step.tables(sampled, planner, self._entries)
        with expecting(sampled):
            works = planner.plan() if self._scheduler.fits() else []
            if not works:
                return None
            plan = self._speculation.plan_prepared(works, tables, sampled, reaches)
            launched = self.launch(plan, listen, step, sampled, tables)
        self.clock.launched(time.perf_counter() - began)
        return launched
