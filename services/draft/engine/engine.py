"""The draft engine: grows the draft tree of every session, and proposes its new nodes.

    1. commits move the roots down; the surviving nodes are already the next proposal
    2. a step takes the likeliest leaves over all sessions and lets a drafter expand them
    3. new nodes that are likely enough are proposed below nodes that the target knows; an empty proposal reports that a
       commit led to none, so that the target does not wait

The engine never waits for the target: while the target verifies, the trees keep growing, which is drafting ahead. The
engine is idle once no leaf is likely enough, or every tree has reached its limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.errors import InvalidRequest, Unavailable
from outrider.serving.features import FeatureBlock
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, SessionFailure, StepOutput
from outrider.speculation.proposal import Commit, FinishReason, Proposal, merge_commits
from outrider.tracing import Tracing
from services.draft.drafters.base import Drafter
from services.draft.engine import trace_spans
from services.draft.engine.beam import BeamFrontier
from services.draft.engine.drafter_stats import DrafterStatsRecorder, count_commit
from services.draft.engine.expansion import ExpansionScheduler, expand
from services.draft.engine.session_slots import QueueOrders, SessionSlots
from services.draft.sessions.claims import ClaimModels
from services.draft.sessions.frontier import BlockFrontier, Frontier, RootFrontier, TreeLimits
from services.draft.sessions.session import DraftSession

_MAX_WAITING_BYTES = 1 << 30  # of hidden states of all sessions that wait for a slot


class DraftEngine(Engine):
    """Owns the sessions and their trees. The main drafter may have a quick one beside it: both grow the same trees.

    sessions: by id. stats: of each drafter, the main one's last. tracing: receives the spans of sessions, if set.
    """

    def __init__(self, drafter: Drafter, limits: TreeLimits, max_running: int, beside: Drafter | None = None) -> None:
        """max_running: largest number of sessions that a drafter holds. beside: a drafter with short rounds."""
        self.drafter = drafter
        self.drafters = (drafter,) if beside is None else (beside, drafter)
        self.limits = limits
        self.max_running = max_running
        self.sessions: dict[int, DraftSession] = {}
        self.stats = [DrafterStatsRecorder(drafter.name) for drafter in self.drafters]
        self.tracing: Tracing | None = None
        self._slots = [SessionSlots(drafter, index, max_running) for index, drafter in enumerate(self.drafters)]
        self._scheduler = ExpansionScheduler(self._slots)
        self._failures: list[SessionFailure] = []
        self._queue_orders = QueueOrders()
        # What commits teach of the drafters' claims, in greedy sessions and in those that sample.
        self._claim_models = [ClaimModels(len(self.drafters)) for _ in range(2)] if beside is not None else None

    # --- sessions ---

    @property
    def running(self) -> dict[int, DraftSession]:
        """Sessions that the main drafter holds, by id."""
        return self._slots[-1].held

    @property
    def waiting(self) -> dict[int, DraftSession]:
        """Sessions that wait for the main drafter, by id, in the order of their admission."""
        return self._slots[-1].waiting

    def open(self, request: OpenSession) -> None:
        """Open a session. A drafter ignores sessions that are longer than it supports.

        Raises InvalidRequest for a session without tokens.
        """
        if not 1 <= request.prompt_length <= len(request.tokens):
            self.close(request.session_id)
            raise InvalidRequest("a session needs at least one token to draft for", param="prompt")
        self._leave(request.session_id, reopens=True)
        frontiers = [self._frontier(drafter) for drafter in self.drafters]
        order = self._queue_orders.take(request.session_id)
        models = self._claim_models[not request.sampling.greedy] if self._claim_models is not None else None
        session = DraftSession(request, self.limits, self.drafter.eos_token_ids, frontiers, order, models)
        if not self.drafter.drafts_ahead and self.drafter.features is None:
            session.draft_budget = 0  # until the first commit: the target is reading the prompt
        for slots in self._slots:
            slots.enter(session)
        if any(session in slots for slots in self._slots):  # otherwise no drafter supports it
            self.sessions[session.id] = session
        self._admit()

    def _frontier(self, drafter: Drafter) -> Frontier:
        if drafter.one_pass:
            return BlockFrontier(self.limits.shape, merged=len(self.drafters) > 1)
        if self.limits.shape is not None and drafter is self.drafter:
            merged = len(self.drafters) > 1
            return BeamFrontier(self.limits.shape, lasting=drafter.features is None, merged=merged)
        floor = max(self.limits.floor, drafter.min_reach)
        # Explicit trees of a feature-based head do not survive commits: beside them only roots are worth expanding.
        ahead = self.limits.shape is None or self.drafter.features is None
        kind = Frontier if drafter.drafts_ahead else RootFrontier
        return kind(drafter.expansions if ahead else 0, floor, from_parents=drafter.from_parents)

    def close(self, session_id: int) -> None:
        """Close a session and release its pages."""
        self._leave(session_id)
        self._admit()

    def _leave(self, session_id: int, *, reopens: bool = False) -> None:
        """Close a session without admitting others. reopens: it keeps its place in the queue."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for slots in self._slots:
            slots.leave(session)
        if reopens:
            self._queue_orders.remember(session)
        if self.tracing is not None and session.span_start.traceparent:
            trace_spans.record(self.tracing, session, [drafter.name for drafter in self.drafters])

    def _admit(self) -> None:
        for slots in self._slots:
            while admitted := slots.admit():  # a session that fails at once leaves its slot to the next
                for session in admitted:
                    self._check_features(session)

    def flush(self, *, only_fed: bool = False) -> None:
        """Drop what drafters keep of texts. only_fed: only of drafters that use the target's hidden states."""
        for drafter in self.drafters:
            if not only_fed:
                drafter.flush()
            elif drafter.features is not None:
                drafter.outdate()

    # --- commits ---

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """Apply commits of the target. Proposals of other drafters are ignored."""
        del proposals
        for commit in merge_commits(commits):
            session = self.sessions.get(commit.session_id)
            if session is not None:
                self._commit(session, commit)
        self._admit()  # a session may have released its pages

    def receive_features(self, blocks: Sequence[FeatureBlock]) -> None:
        """Keep hidden states of the target for the main drafter."""
        if self.drafter.features is None:
            return
        for block in blocks:
            session = self.sessions.get(block.session_id)
            if session is not None and session in self._slots[-1]:
                session.features.add(block.first, block.rows)
                self._check_features(session)
            elif session is None:
                self.drafter.late_features(block)
        self._limit_waiting_features()
        self._admit()  # a session that failed has left its slot

    def _limit_waiting_features(self) -> None:
        """Drop hidden states of waiting sessions beyond a limit; they are requested again when there is a slot."""
        held = sum(session.features.nbytes for session in self.waiting.values())
        for session in reversed(self.waiting.values()):
            if held <= _MAX_WAITING_BYTES:
                break
            if own := session.features.nbytes:
                held -= own
                session.features.give_up()

    def _check_features(self, session: DraftSession) -> None:
        """Let the main drafter examine a session's hidden states, if it holds the session."""
        if session.id in self.running:
            try:
                self.drafter.features_changed(session)
            except Unavailable as error:
                self._fail(session, error.message)

    def _commit(self, session: DraftSession, commit: Commit) -> None:
        known = session.length - commit.base_length
        if commit.finish_reason != FinishReason.RUNNING:
            for slots in self._slots:
                slots.finished(session, commit.tokens[known:] if known >= 0 else commit.tokens[:0])
            self.close(session.id)
            return
        if known < 0:
            self._fail(session, f"commits of {-known} tokens are missing")
        elif known < len(commit.tokens):
            self._apply(session, commit, known)
        elif known == 0:  # a commit without tokens changes the draft budget
            session.draft_budget = commit.draft_budget

    def _apply(self, session: DraftSession, commit: Commit, known: int) -> None:
        tokens = commit.tokens[known:]
        session.draft_budget = commit.draft_budget
        path = session.tree.path_of(tokens.tolist())
        count_commit(self.stats, session, tokens.tolist(), path)
        if session.grower.claims is not None:
            session.grower.claims.learn(tokens.tolist(), path)
        ready = [slots.will_commit(session, len(tokens), path) for slots in self._slots]
        kept = session.commit(tokens, ready[-1])
        for slots in self._slots:
            slots.did_commit(session, kept)
        if session.tree.root_hash != commit.root_hash:
            self._fail(session, "its tokens differ from the target's")
        else:  # sessions without a drafter still get empty proposals, so that the target does not wait for them
            self._check_features(session)

    def _fail(self, session: DraftSession, reason: str) -> None:
        """Close a session, and report the failure with the next step. The caller admits others."""
        self._leave(session.id, reopens=True)
        error = Unavailable(f"the draft service lost track of the session: {reason}; open it again")
        self._failures.append(SessionFailure(session.id, error))

    # --- steps ---

    @property
    def idle(self) -> bool:
        """True if no tree can grow, no proposal is due, and no drafter has background work."""
        return (
            not self._failures
            and not any(drafter.busy for drafter in self.drafters)
            and not any(session.growing or not session.nothing_to_send for session in self.sessions.values())
        )

    def step(self) -> StepOutput:
        """Expand leaves of the trees, and return the new proposals."""
        self._admit()
        for drafter in self.drafters:
            drafter.work()
        requests, index = self._scheduler.choose()
        drafter = self.drafters[index]
        left = drafter.expansions_per_step
        while requests:
            left -= expand(drafter, requests, index)
            requests = self._scheduler.requests(index) if left > 0 else []
        proposals = [proposal for session in self.sessions.values() for proposal in session.reply()]
        failures, self._failures = self._failures, []
        return StepOutput(proposals=proposals, failures=failures, load=self.load())

    def load(self) -> EngineLoad:
        """Sessions, pages and draft statistics at present."""
        return replace(
            self.drafter.load(),
            running_sessions=len(self.running),
            waiting_sessions=len(self.waiting),
            drafters=tuple(own.load() for own in self.stats),
        )

    def check(self) -> None:
        """Audit the pages. Raises EngineFault."""
        for drafter in self.drafters:
            drafter.check()
