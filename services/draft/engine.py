"""The draft engine: grows every session's speculation tree and says what is new in it.

    1. commits move the roots down; what survives below them is already the next proposal
    2. a step takes the most promising leaves over all sessions and lets the drafter expand them
    3. nodes that are new and likely enough are proposed, hung on what the target knows; an empty proposal tells it
       that a commit has led to none, so that it need not wait

Nothing waits for the target: while it verifies, the trees keep growing, and that is all there is to drafting ahead. The
engine rests once no leaf is likely enough, or every tree is as large as it may be.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from outrider.errors import InvalidRequest, Unavailable
from outrider.paging.allocator import OutOfPages
from outrider.serving.features import FeatureBlock
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, SessionFailure, StepOutput
from outrider.speculation.proposal import Commit, FinishReason, Proposal
from services.draft.drafters.base import Drafter, Wish
from services.draft.session import DraftSession, TreeLimits

log = logging.getLogger(__name__)

# Wishes of a session that one round looks at; more than any drafter grants.
_WISHES_A_SESSION = 16


class DraftEngine(Engine):
    """Owns the sessions and their trees. A session runs while there is a place and pages; otherwise it waits."""

    def __init__(self, drafter: Drafter, limits: TreeLimits, max_running: int) -> None:
        """max_running: most sessions that are drafted for together."""
        self.drafter = drafter
        self.limits = limits
        self.max_running = max_running
        self._running: dict[int, DraftSession] = {}
        self._waiting: dict[int, DraftSession] = {}
        self._blocked = False  # the first waiting session found no pages; try again when some come home
        self._failures: list[SessionFailure] = []

    # --- sessions ---

    def open(self, request: OpenSession) -> None:
        """Take a session on. One that is longer than the drafter can follow is not drafted for."""
        self.close(request.session_id)
        if not 1 <= request.prompt_length <= len(request.tokens):
            raise InvalidRequest("a session needs at least one token to draft for", param="prompt")
        session = DraftSession(request, self.limits, self.drafter.eos_token_ids)
        if not self._too_long(session):
            self._waiting[session.id] = session
            self._admit()

    def close(self, session_id: int) -> None:
        """Forget a session and free what it holds."""
        self._waiting.pop(session_id, None)
        session = self._running.pop(session_id, None)
        if session is not None:
            self.drafter.close(session)
            self._blocked = False
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running and not self._blocked:
            session = next(iter(self._waiting.values()))
            try:
                self.drafter.open(session)
            except OutOfPages:
                # Pages come home when a session ends; if none runs, this one can never be held.
                self._blocked = bool(self._running)
                if not self._running:
                    log.info("session %d does not fit into the draft's cache and is not drafted for", session.id)
                    del self._waiting[session.id]
                continue
            self._running[session.id] = self._waiting.pop(session.id)
            self._feed(session)

    def _suspend(self, session: DraftSession) -> None:
        """Pages ran out: give the session's back and queue it again; its text goes on without hints meanwhile."""
        del self._running[session.id]
        self.drafter.close(session)
        session.reset()
        session.features.give_up()  # those that were used are gone
        self._waiting[session.id] = session
        self._blocked = bool(self._running)

    def _too_long(self, session: DraftSession) -> bool:
        limit = self.drafter.max_session_tokens
        return limit > 0 and session.length >= limit

    # --- commits ---

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """Apply what the target committed. Proposals of other drafters are of no use here."""
        del proposals
        for commit in commits:
            session = self._running.get(commit.session_id) or self._waiting.get(commit.session_id)
            if session is not None:
                self._commit(session, commit)

    def receive_features(self, blocks: Sequence[FeatureBlock]) -> None:
        """Keep hidden states of the target for a drafter that feeds on them."""
        if self.drafter.features is None:
            return
        for block in blocks:
            session = self._running.get(block.session_id) or self._waiting.get(block.session_id)
            if session is not None:
                session.features.add(block.first, block.rows)
                if session.id in self._running:
                    self._feed(session)

    def _feed(self, session: DraftSession) -> None:
        try:
            self.drafter.fed(session)
        except Unavailable as error:
            self._fail(session, error.message)

    def _commit(self, session: DraftSession, commit: Commit) -> None:
        if commit.finish_reason != FinishReason.RUNNING:
            self.close(session.id)
            return
        known = session.length - commit.base_length
        if known < 0:
            self._fail(session, f"commits of {-known} tokens are missing")
        elif known < len(commit.tokens):
            self._apply(session, commit, known)

    def _apply(self, session: DraftSession, commit: Commit, known: int) -> None:
        tokens = commit.tokens[known:]
        session.wanted = commit.wanted
        path = session.path_of(tokens.tolist())
        running, ready = session.id in self._running, False
        try:
            if running:
                ready = self.drafter.will_commit(session, len(tokens), path)
        except OutOfPages:
            session.commit(tokens, root_expanded=False)
            self._suspend(session)
        else:
            kept = session.commit(tokens, ready)
            if running:
                self.drafter.did_commit(session, kept)
        if session.tree.root_hash != commit.root_hash:
            self._fail(session, "its tokens differ from the target's")
        elif self._too_long(session):
            self.close(session.id)
        elif session.id in self._running:
            self._feed(session)

    def _fail(self, session: DraftSession, reason: str) -> None:
        self.close(session.id)
        error = Unavailable(f"the draft service lost track of the session: {reason}; open it again")
        self._failures.append(SessionFailure(session.id, error))

    # --- steps ---

    @property
    def idle(self) -> bool:
        """True if no tree wants to grow."""
        return not self._failures and not any(
            session.wishes(1) or not session.silent for session in self._running.values()
        )

    def step(self) -> StepOutput:
        """One round of growth, and what came of it."""
        self._admit()
        if wishes := self._wishes():
            grown = self.drafter.grow(wishes)
            for growth in grown:
                growth.session.add(growth.node, growth.tokens, growth.parents, growth.log_scores)
                growth.session.rounds_waited = 0
        proposals = [proposal for session in self._running.values() for proposal in session.answer()]
        failures, self._failures = self._failures, []
        return StepOutput(proposals=proposals, failures=failures, load=self.load())

    def _wishes(self) -> list[Wish]:
        """The most promising nodes over all sessions, best first; of equals, the session that waited longest."""
        wishes: list[Wish] = []
        for session in self._running.values():
            own = session.wishes(_WISHES_A_SESSION)
            session.rounds_waited += bool(own)
            wishes += [Wish(session, node, reach) for reach, node in own]
        wishes.sort(key=lambda wish: (-wish.log_reach, -wish.session.rounds_waited))
        return wishes

    def load(self) -> EngineLoad:
        """Sessions and pages at present."""
        return replace(self.drafter.load(), running_sessions=len(self._running), waiting_sessions=len(self._waiting))

    def check(self) -> None:
        """Audit the pages. Raises EngineFault."""
        self.drafter.check()
