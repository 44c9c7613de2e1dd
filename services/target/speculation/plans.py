"""Kinds of steps. A plan holds what the device computes, and how the engine learns from the outcome.

ServiceStep     one step: committed tokens, and draft tokens of draft services
MultiStep       several plain steps in one call
SelfDraftStep   one step with draft tokens of the target's own sources
MixedStep       one step with proposals of some sessions, and draft tokens of the target's own for others
LoopStep        a fused loop of drafting and verification, of one session
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from outrider.serving.loop import MessageWatch
from outrider.serving.session import Session
from services.target.sampling.session import TargetSession
from services.target.speculation.budget import Budget, promised
from services.target.speculation.chooser import SourceChooser
from services.target.speculation.multi_step import MultiStepPlanner, interrupts, lookup_texts
from services.target.speculation.planner import Planner
from services.target.speculation.sources.base import DraftSource, ModelSource
from services.target.speculation.sources.draft_service import DraftService
from services.target.step.batch import SessionWork
from services.target.step.programs import FusedLoop, LoopIteration, MultiStepDecoding, StepProgram


@dataclass(frozen=True)
class Timing:
    """How long a step took.

    waited:  seconds before it in which the engine did not compute
    seconds: of each of its steps of the model
    steps:   of the model
    """

    waited: float
    seconds: float
    steps: int


@dataclass(frozen=True)
class Outcome:
    """What became of a session's draft tokens in a step. goes_on: False if the session ended with it."""

    session: Session
    path: Sequence[int]
    goes_on: bool
    iterations: Sequence[LoopIteration] = ()


@dataclass
class StepPlan(ABC):
    """One of the kinds.

    works:  what the step computes of each session
    filler: tokens that it computes beside these: a prepared step has room for more draft tokens than survive
    """

    works: Sequence[SessionWork]
    service: DraftService
    budget: Budget
    filler: int = field(default=0, kw_only=True)

    def source_of(self, session_id: int) -> DraftSource:
        """The source of a session's draft tokens, if it has any."""
        del session_id
        return self.service

    @property
    def _size(self) -> tuple[int, int]:
        """Tokens of the step, and cached tokens that its attention reads."""
        tokens = sum(len(work.chunk) + len(work.draft) for work in self.works) + self.filler
        return tokens, sum(work.chunk.stop for work in self.works)

    @property
    def expected_seconds(self) -> float:
        """Seconds that the step takes, by the cost model."""
        return self.budget.cost.step(*self._size)[0]

    def program(self, listen: MessageWatch) -> AbstractContextManager[StepProgram | None]:
        """What follows within the same call. listen: how a message interrupts it, while the context lasts."""
        del listen
        return nullcontext()

    def verified(self, work: SessionWork, outcome: Outcome) -> tuple[int, int]:
        """Draft tokens of a session that its commit reports as verified and as accepted."""
        return len(work.draft.tokens), len(outcome.path)

    @abstractmethod
    def observe(self, work: SessionWork, outcome: Outcome) -> None:
        """Learn from one session's draft, before its tokens are committed."""

    @abstractmethod
    def finish(self, works: Sequence[SessionWork], accepted: int, timing: Timing) -> None:
        """Learn from the step as a whole. works: those that still counted. accepted: draft tokens of all sessions."""

    def _observe_service(self, work: SessionWork, outcome: Outcome) -> None:
        self.service.observe(outcome.session.id, work.draft, outcome.path, goes_on=outcome.goes_on)

    def _finish_service(self, works: Sequence[SessionWork], accepted: int, timing: Timing) -> None:
        drafts = [work.draft for work in works if len(work.draft.tokens)]
        self.service.calibrations.overall.observe(sum(map(promised, drafts)), accepted if drafts else 0)
        self.budget.waited(timing.waited)
        self._observe_cost(timing)

    def _observe_cost(self, timing: Timing) -> None:
        self.budget.cost.observe(*self._size, timing.seconds)

    def _count_paused(self, works: Sequence[SessionWork], timing: Timing) -> None:
        """Count the steps behind the first one, which was counted when it was planned."""
        if timing.steps > 1 and self.service.stats.started:
            self.service.stats.paused((timing.steps - 1) * len(works))


@dataclass
class ServiceStep(StepPlan):
    """A step that verifies proposals, or none: then it is plain decoding."""

    observe = StepPlan._observe_service
    finish = StepPlan._finish_service


@dataclass
class MultiStep(StepPlan):
    """Plain steps. decoding: of the sessions, without the files of its interrupts."""

    decoding: MultiStepDecoding

    observe = StepPlan._observe_service

    def program(self, listen: MessageWatch) -> AbstractContextManager[StepProgram | None]:
        """As of StepPlan."""
        return _interruptible(self.decoding, listen)

    def finish(self, works: Sequence[SessionWork], accepted: int, timing: Timing) -> None:
        """As of StepPlan."""
        self._finish_service(works, accepted, timing)
        self._count_paused(works, timing)


@dataclass
class SelfDraftStep(StepPlan):
    """A step with draft tokens of the target's own. sources: of each session that has some, by id."""

    sources: Mapping[int, DraftSource]

    def source_of(self, session_id: int) -> DraftSource:
        """As of StepPlan."""
        return self.sources.get(session_id, self.service)

    def observe(self, work: SessionWork, outcome: Outcome) -> None:
        """As of StepPlan."""
        if len(work.draft.tokens) and (source := self.sources.get(outcome.session.id)) is not None:
            source.observe(outcome.session.id, work.draft, outcome.path, goes_on=outcome.goes_on)

    def finish(self, works: Sequence[SessionWork], accepted: int, timing: Timing) -> None:
        """As of StepPlan."""
        del works, accepted
        self._observe_cost(timing)


@dataclass
class MixedStep(SelfDraftStep):
    """A step with proposals, and draft tokens of the target's own for sessions that have no proposal to verify.

    accepted_proposals: accepted draft tokens of the draft service
    """

    accepted_proposals: int = 0

    def observe(self, work: SessionWork, outcome: Outcome) -> None:
        """As of StepPlan."""
        if outcome.session.id in self.sources:
            super().observe(work, outcome)
        else:
            self._observe_service(work, outcome)
            self.accepted_proposals += len(outcome.path)

    def finish(self, works: Sequence[SessionWork], accepted: int, timing: Timing) -> None:
        """As of StepPlan."""
        del accepted
        others = [work for work in works if work.chunk.session.id not in self.sources]
        self._finish_service(others, self.accepted_proposals, timing)


@dataclass
class LoopStep(StepPlan):
    """A fused loop. source: whose it is; loop: without the files of its interrupts."""

    source: ModelSource
    loop: FusedLoop

    def source_of(self, session_id: int) -> DraftSource:
        """As of StepPlan."""
        del session_id
        return self.source

    def program(self, listen: MessageWatch) -> AbstractContextManager[StepProgram | None]:
        """As of StepPlan."""
        return _interruptible(self.loop, listen)

    def verified(self, work: SessionWork, outcome: Outcome) -> tuple[int, int]:
        """Those of the last iteration; the others have commits of their own."""
        del work
        last = outcome.iterations[-1]
        return last.verified, last.accepted

    def observe(self, work: SessionWork, outcome: Outcome) -> None:
        """As of StepPlan."""
        del work
        self.source.observe_loop(outcome.session, outcome.iterations, goes_on=outcome.goes_on)

    def finish(self, works: Sequence[SessionWork], accepted: int, timing: Timing) -> None:
        """As of StepPlan."""
        del accepted
        self._count_paused(works, timing)


@contextmanager
def _interruptible(program: MultiStepDecoding | FusedLoop, listen: MessageWatch) -> Iterator[StepProgram]:
    """A program that returns once a message arrives, while the context lasts."""
    with listen() as files:
        yield replace(program, interrupts=replace(program.interrupts, files=array("i", files)))


class PlanMaker:
    """Makes the plans of one engine: the kind of a step follows from its draft tokens."""

    def __init__(
        self,
        planner: Planner,
        service: DraftService,
        multi_step: MultiStepPlanner,
        sessions: Mapping[int, TargetSession],
    ) -> None:
        """sessions: those that are open, by id."""
        self._planner, self._service = planner, service
        self._multi_step, self._sessions = multi_step, sessions

    def mixed(self, works: Sequence[SessionWork], listen: MessageWatch, chooser: SourceChooser) -> StepPlan:
        """A step with proposals, in which the target's own sources draft for sessions that have none to verify."""
        choice = chooser.choose(works, listen, 0.0)
        return MixedStep(choice.works, self._service, self._planner.budget, choice.sources)

    def self_drafted(
        self, works: Sequence[SessionWork], listen: MessageWatch, chooser: SourceChooser, *, alone: bool, loops: bool
    ) -> StepPlan:
        """A step, or a loop, with draft tokens of the target's own sources where they pay.

        alone, loops: several steps may follow within one call: plain ones; of drafting and verification
        """
        choice = chooser.choose(works, listen, self._multi_step.window if loops else 0.0)
        parts = self._service, self._planner.budget
        if choice.loop is not None:
            source, loop = choice.loop
            session = works[0].chunk.session
            looks_up = chooser.looks_up and chooser.lookup.kind in session.drafting.sources
            match = chooser.lookup.min_match if looks_up else 0
            return LoopStep(works, *parts, source, replace(loop, texts=replace(loop.texts, match=match)))
        if choice.sources:
            return SelfDraftStep(choice.works, *parts, choice.sources)
        return self.plain(works, alone=alone, match=chooser.lookup.min_match if chooser.looks_up else 0)

    def plain(self, works: Sequence[SessionWork], *, alone: bool, match: int = 0) -> StepPlan:
        """A step with proposals, or several plain ones. match: as of SessionTexts."""
        parts = self._service, self._planner.budget
        steps = self._multi_step.steps(works) if alone else 1
        if steps < 2:
            return ServiceStep(works, *parts)
        entries = [self._sessions[work.chunk.session.id] for work in works]
        looked_up = lookup_texts(entries, steps, match)
        return MultiStep(works, *parts, MultiStepDecoding(steps, interrupts(entries), looked_up))
