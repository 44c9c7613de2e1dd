"""The draft engine: grows every session's speculation tree and says what is new in it.

    1. commits move the roots down; what survives below them is already the next proposal
    2. a step takes the most promising leaves over all sessions and lets the drafter expand them
    3. nodes that are new and likely enough are proposed, hung on what the target knows; an empty proposal tells it
       that a commit has led to none, so that it need not wait

Nothing waits for the target: while it verifies, the trees keep growing, and that is all there is to drafting ahead. The
engine rests once no leaf is likely enough, or every tree is as large as it may be.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from outrider.errors import InvalidRequest, Unavailable
from outrider.serving.features import FeatureBlock
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, SessionFailure, StepOutput
from outrider.speculation.proposal import Commit, FinishReason, Proposal, merge_commits
from outrider.speculation.tree import ROOT
from outrider.tracing import Tracing
from services.draft.drafters.base import Drafter, Wish
from services.draft.engine import spans
from services.draft.engine.beam import BeamFrontier
from services.draft.engine.draft_stats import Record, observe
from services.draft.engine.weight_slots import Places
from services.draft.sessions.frontier import Frontier, TreeLimits
from services.draft.sessions.session import DraftSession

# Wishes of a session that one round looks at; more than any drafter grants.
_WISHES_A_SESSION = 16
# A round of waiting counts as this much log-probability, so that no session waits for ever behind likelier nodes.
_PATIENCE = 0.1
_MOST_WAITING = 1 << 30  # bytes of hidden states of all sessions that wait for a place
_MOST_TURNS = 1024  # sessions that keep their turns until they are opened again; not all are


class DraftEngine(Engine):
    """Owns the sessions and their trees. The main drafter may have a quick one beside it: both grow the same trees."""

    def __init__(self, drafter: Drafter, limits: TreeLimits, max_running: int, beside: Drafter | None = None) -> None:
        """max_running: most sessions that are drafted for together. beside: a drafter of short rounds."""
        self.drafter = drafter
        self.drafters = (drafter,) if beside is None else (beside, drafter)
        self.limits = limits
        self.max_running = max_running
        self._sessions: dict[int, DraftSession] = {}
        self._places = [Places(drafter, index, max_running) for index, drafter in enumerate(self.drafters)]
        self._records = [Record(drafter.name) for drafter in self.drafters]
        self._quick_was_last = False
        self._failures: list[SessionFailure] = []
        self._newest = itertools.count()  # turns of new sessions
        self._turns: dict[int, int] = {}  # of those that are to be opened again
        self.tracing: Tracing | None = None  # where spans of sessions go

    # --- sessions ---

    @property
    def running(self) -> dict[int, DraftSession]:
        """Sessions that the main drafter holds, by id."""
        return self._places[-1].held

    def open(self, request: OpenSession) -> None:
        """Take a session on. One that is longer than a drafter can follow is not drafted for by it.

        Raises InvalidRequest for a session without tokens.
        """
        if not 1 <= request.prompt_length <= len(request.tokens):
            self.close(request.session_id)
            raise InvalidRequest("a session needs at least one token to draft for", param="prompt")
        self._leave(request.session_id, comes_again=True)
        frontiers = [self._frontier(drafter) for drafter in self.drafters]
        turn = self._turns.pop(request.session_id, None)
        turn = next(self._newest) if turn is None else turn
        session = DraftSession(request, self.limits, self.drafter.eos_token_ids, frontiers, turn)
        for places in self._places:
            places.enter(session)
        if any(session in places for places in self._places):  # nobody waits for one that was never drafted for
            self._sessions[session.id] = session
        self._admit()

    def _frontier(self, drafter: Drafter) -> Frontier:
        if self.limits.shape is not None and drafter is self.drafter:
            merged = len(self.drafters) > 1
            return BeamFrontier(self.limits.shape, lasting=drafter.features is None, merged=merged)
        floor = max(self.limits.floor, drafter.least_reach)
        # Beside a head's explicit trees nothing outlasts a commit: roots alone are worth a look.
        ahead = self.limits.shape is None or self.drafter.features is None
        return Frontier(drafter.expansions if ahead else 0, floor, from_parents=drafter.from_parents)

    def close(self, session_id: int) -> None:
        """Forget a session and free what it holds."""
        self._leave(session_id)
        self._admit()

    def _leave(self, session_id: int, *, comes_again: bool = False) -> None:
        """What `close` does for a session itself. comes_again: it goes before all that came later then."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        for places in self._places:
            places.leave(session)
        if comes_again:
            self._turns[session_id] = session.turn
            if len(self._turns) > _MOST_TURNS:
                del self._turns[next(iter(self._turns))]
        if self.tracing is not None and session.traceparent:
            spans.tell(self.tracing, session, [drafter.name for drafter in self.drafters])

    def _admit(self) -> None:
        for places in self._places:
            while admitted := places.admit():  # one that fails at once has left its place to the next
                for session in admitted:
                    self._feed(session)

    def flush(self, *, only_fed: bool = False) -> None:
        """Forget what drafters have kept of texts for later ones. only_fed: what a target's hidden states went into."""
        for drafter in self.drafters:
            if drafter.features is not None or not only_fed:
                drafter.flush()

    # --- commits ---

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """Apply what the target committed. Proposals of other drafters are of no use here."""
        del proposals
        for commit in merge_commits(commits):
            session = self._sessions.get(commit.session_id)
            if session is not None:
                self._commit(session, commit)
        self._admit()  # one that has given its pages back may have made room

    def receive_features(self, blocks: Sequence[FeatureBlock]) -> None:
        """Keep hidden states of the target for a drafter that feeds on them."""
        if self.drafter.features is None:
            return
        for block in blocks:
            session = self._sessions.get(block.session_id)
            if session is not None and session in self._places[-1]:
                session.features.add(block.first, block.rows)
                self._feed(session)
            elif session is None:
                self.drafter.overtaken(block)
        self._give_up_waiting()
        self._admit()  # one that failed has left its place

    def _give_up_waiting(self) -> None:
        """Drop hidden states of waiting sessions that are too many; they are asked for again where there is a place."""
        waiting = self._places[-1].waiting.values()
        held = sum(session.features.nbytes for session in waiting)
        for session in reversed(waiting):
            if held <= _MOST_WAITING:
                break
            if own := session.features.nbytes:
                held -= own
                session.features.give_up()

    def _feed(self, session: DraftSession) -> None:
        """Let the main drafter look at a session's hidden states, if it holds the session."""
        if session.id in self.running:
            try:
                self.drafter.fed(session)
            except Unavailable as error:
                self._fail(session, error.message)

    def _commit(self, session: DraftSession, commit: Commit) -> None:
        known = session.length - commit.base_length
        if commit.finish_reason != FinishReason.RUNNING:
            for places in self._places:
                places.ended(session, commit.tokens[known:] if known >= 0 else commit.tokens[:0])
            self.close(session.id)
            return
        if known < 0:
            self._fail(session, f"commits of {-known} tokens are missing")
        elif known < len(commit.tokens):
            self._apply(session, commit, known)
        elif known == 0:  # no tokens yet: a word of whether hints are wanted
            session.draft_budget = commit.draft_budget

    def _apply(self, session: DraftSession, commit: Commit, known: int) -> None:
        tokens = commit.tokens[known:]
        session.draft_budget = commit.draft_budget
        path = session.path_of(tokens.tolist())
        observe(self._records, session, tokens.tolist(), path)
        ready = [places.will_commit(session, len(tokens), path) for places in self._places]
        kept = session.commit(tokens, ready[-1])
        for places in self._places:
            places.did_commit(session, kept)
        if session.tree.root_hash != commit.root_hash:
            self._fail(session, "its tokens differ from the target's")
        else:  # one that has outgrown all drafters is answered on: a silent one would be waited for
            self._feed(session)

    def _fail(self, session: DraftSession, reason: str) -> None:
        """Let go of a session, and say so with the next step. Whoever calls sees to who gets its place."""
        self._leave(session.id, comes_again=True)
        error = Unavailable(f"the draft service lost track of the session: {reason}; open it again")
        self._failures.append(SessionFailure(session.id, error))

    # --- steps ---

    @property
    def idle(self) -> bool:
        """True if no tree wants to grow, and no drafter has work of its own."""
        return (
            not self._failures
            and not any(drafter.busy for drafter in self.drafters)
            and not any(session.growing or not session.silent for session in self._sessions.values())
        )

    def step(self) -> StepOutput:
        """One round of growth, and what came of it."""
        self._admit()
        for drafter in self.drafters:
            drafter.work()
        wishes, index = self._choose()
        left = self.drafters[index].step_wishes
        while wishes:
            left -= self._grow(wishes, index)
            wishes = self._wishes(index) if left > 0 else []
        proposals = [proposal for session in self._sessions.values() for proposal in session.answer()]
        failures, self._failures = self._failures, []
        return StepOutput(proposals=proposals, failures=failures, load=self.load())

    def _grow(self, wishes: Sequence[Wish], index: int) -> int:
        """Let a drafter grant wishes. Returns how many it granted, or what a step can take if it granted none."""
        drafter = self.drafters[index]
        growths = drafter.grow(wishes)
        for growth in growths:
            if growth.whole:
                growth.session.plant(growth.tokens, growth.parents, growth.log_scores, index)
            else:
                growth.session.add(growth.node, growth.tokens, growth.parents, growth.log_scores, index)
            growth.session.frontiers[index].rounds_waited = 0
        return len(growths) or drafter.step_wishes

    def _choose(self) -> tuple[list[Wish], int]:
        """The wishes that this round is about, and the index of the drafter that may grant them.

        The quick drafter comes first where a root is new: its hints are out before the main one has begun. Apart from
        that they take turns.
        """
        main = len(self.drafters) - 1
        quick = self._wishes(0) if main else []
        if quick and (quick[0].node == ROOT or not self._quick_was_last):
            self._quick_was_last = True
            return quick, 0
        self._quick_was_last = False
        wishes = self._wishes(main)
        return (wishes, main) if wishes or not quick else (quick, 0)

    def _wishes(self, index: int) -> list[Wish]:
        """The most promising nodes for a drafter over all sessions, best first; those count more that wait longer."""
        ranked: list[tuple[float, int, int, Wish]] = []
        for session in self._places[index].held.values():
            if own := session.wishes(_WISHES_A_SESSION, index):
                frontier = session.frontiers[index]
                frontier.rounds_waited += 1
                bonus = _PATIENCE * (frontier.rounds_waited - 1)
                waited, first = -frontier.rounds_waited, len(ranked)
                for place, (reach, node) in enumerate(own, first):
                    log_reach = min(reach + bonus, 0.0)
                    ranked.append((-log_reach, waited, place, Wish(session, node, log_reach)))
        ranked.sort()  # of equals the first: no two places are alike
        return [wish for *_, wish in ranked]

    def load(self) -> EngineLoad:
        """Sessions and pages at present."""
        main = self._places[-1]
        return replace(
            self.drafter.load(),
            running_sessions=len(main.held),
            waiting_sessions=len(main.waiting),
            drafters=tuple(record.load() for record in self._records),
        )

    def check(self) -> None:
        """Audit the pages. Raises EngineFault."""
        for drafter in self.drafters:
            drafter.check()
