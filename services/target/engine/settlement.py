"""Settling a step: walk each session's draft along its samples, commit, compact the cache, end what has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.errors import EngineFault
from outrider.serving.messages import StepOutput
from outrider.serving.session import Session
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import Commit, FinishReason
from services.target.engine import commits
from services.target.engine.sessions import OpenSessions
from services.target.engine.verifier import StepOutcome, verify
from services.target.features.features import Features
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.sampling.compaction import Moves
from services.target.sampling.samples import StepSamples
from services.target.sampling.session import TargetSession
from services.target.speculation.controller import Speculation
from services.target.speculation.plans import Outcome, StepPlan
from services.target.step.batch import SessionWork


@dataclass
class _Settled:
    """What has come of a step so far.

    commits:  of sessions that got tokens; accepted: their draft tokens
    pauses:   commits without tokens
    moves:    of accepted tokens in the cache
    sessions: that got tokens
    urgent:   a client waits for its first or last token, or a drafter for a commit
    leases:   tokens of sessions that the step behind has pages for, by session id; their roots are computed
    """

    leases: Mapping[int, int]

    commits: list[Commit] = field(default_factory=list)
    pauses: list[Commit] = field(default_factory=list)
    moves: Moves = field(default_factory=Moves)
    accepted: int = 0
    sessions: int = 0
    urgent: bool = False


class Settlement:
    """Settles the steps of one engine."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        features: Features,
        sessions: OpenSessions,
        speculation: Speculation,
        close: Callable[[int], None],
    ) -> None:
        """close: ends a session."""
        self._model, self._cache, self._features = model, cache, features
        self._sessions, self._speculation, self._close = sessions, speculation, close

    def settle(
        self,
        plan: StepPlan,
        works: Sequence[SessionWork],
        samples: StepSamples,
        output: StepOutput,
        leases: Mapping[int, int],
    ) -> int:
        """Commit what a step sampled. works: those of the plan that still count. leases: as of InFlightStep, behind it.

        Returns the draft tokens that were accepted.
        """
        settled, first = _Settled(leases), 0
        for work in works:
            if work.chunk.session.scores.needed:
                _note_scores(work)
            if not work.chunk.last:
                self._settle_chunk(work, settled)
                continue
            behind = first + len(work.draft.tokens) + 1
            sampled, first = samples.of(first, behind), behind
            entry = self._sessions.by_id[work.chunk.session.id]
            try:
                outcome = verify(work.draft, sampled, entry.stop_ids, self._speculation.planner.room(entry.session))
            except EngineFault as fault:
                output.failures += self._sessions.stuck(work, fault)
                continue
            self._settle_session(plan, work, entry, outcome, samples, settled)
        settled.moves.make(self._cache, self._model.device)
        prompt_tokens = sum(len(work.chunk) for work in works) - len(works)  # a root per session is none of them
        self._speculation.settled(settled.commits, settled.sessions, prompt_tokens, samples.model_steps)
        self._report(settled, samples, output)
        return settled.accepted

    def _settle_chunk(self, work: SessionWork, settled: _Settled) -> None:
        """A part of a prompt was computed, after which nothing is sampled."""
        session = work.chunk.session
        self._features.settle(work, (), goes_on=True)
        if self._speculation.policy.drafting_paused and self._features.asked and not session.drafting.paused:
            settled.pauses.append(commits.paused(self._sessions.by_id[session.id]))

    def _settle_session(
        self,
        plan: StepPlan,
        work: SessionWork,
        entry: TargetSession,
        outcome: StepOutcome,
        samples: StepSamples,
        settled: _Settled,
    ) -> None:
        """Commit one session's tokens."""
        session = entry.session
        goes_on = outcome.reason == FinishReason.RUNNING
        drafted = Outcome(session, outcome.path, goes_on, samples.iterations)
        plan.observe(work, drafted)
        if samples.iterations:
            kind = plan.source_of(session.id).kind
            earlier, rest = commits.of_earlier_iterations(entry, samples.iterations, outcome.tokens, kind)
            settled.commits += earlier
            settled.urgent = settled.urgent or any(self._is_urgent(commit, session) for commit in earlier)
            outcome = outcome._replace(tokens=rest)
        self._features.settle(work, outcome.path, goes_on=goes_on)
        if goes_on and outcome.path and not samples.moved:
            settled.moves.add(session, outcome.path)
        leased = settled.leases.get(session.id)
        commit = self._commit(plan, work, entry, outcome, samples, plan.verified(work, drafted), leased)
        settled.commits.append(commit)
        settled.sessions += 1
        settled.accepted += commit.accepted
        settled.urgent = settled.urgent or self._is_urgent(commit, session)

    def _commit(
        self,
        plan: StepPlan,
        work: SessionWork,
        entry: TargetSession,
        outcome: StepOutcome,
        samples: StepSamples,
        counts: tuple[int, int],
        leased: int | None,
    ) -> Commit:
        """Append a session's tokens. counts: draft tokens that were verified and accepted. leased: as of _Settled."""
        session, tree = entry.session, entry.tree
        base, held = session.length, len(tree)
        logprobs = samples.logprobs(entry, outcome.path, len(outcome.tokens))
        entry.append(outcome.tokens)
        source = plan.source_of(session.id).kind
        verified = len(work.draft.tokens) if source is SourceKind.DRAFT else 0
        self._speculation.service.stats.unverified += held - verified - len(tree)
        budget = 0
        if outcome.reason == FinishReason.RUNNING:
            session.computed = max(session.computed, session.length - (leased is None))
            session.table.truncate(max(session.length, leased or 0))
            budget = self._speculation.budget(entry)
        else:
            self._close(session.id)
        commit = Commit(
            session.id, base, outcome.tokens, tree.root_hash, *counts, outcome.reason,
            draft_budget=budget, logprobs=logprobs, source=source if counts[0] else 0,
        )  # fmt: skip
        return commit if base > session.opened_length else commits.first(commit, entry)

    def _is_urgent(self, commit: Commit, session: Session) -> bool:
        """True for the first commit of a session and the last, and for one that a drafter waits for."""
        begins, ends = commit.base_length == session.opened_length, commit.finish_reason != FinishReason.RUNNING
        return begins or ends or (commit.draft_budget > 0 and self._speculation.policy.wait.drafts_for(session.id))

    def _report(self, settled: _Settled, samples: StepSamples, output: StepOutput) -> None:
        paused = self._speculation.policy.drafting_paused
        output.commits += settled.commits + settled.pauses
        output.steps = samples.model_steps
        output.features = self._features.flush(deferred=paused)
        output.urgent = settled.urgent or bool(output.failures or (output.features and not paused))


def _note_scores(work: SessionWork) -> None:
    """Prompt tokens whose log-probabilities are known now."""
    session = work.chunk.session
    session.scores.computed = min(max(session.scores.computed, work.chunk.stop), session.scores.needed)
