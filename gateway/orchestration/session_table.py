"""All open sessions: opens them on the services, closes them, and bounds how long they wait for a target."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import replace

from gateway.admission.retry_after import bounded
from gateway.admission.turns import Turns
from gateway.orchestration.target_absence import TargetAbsence
from gateway.pools.placement import Placement
from gateway.sessions.draft_watch import DraftWatches
from gateway.sessions.request import GenerationRequest
from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider.errors import OutriderError, Unavailable
from outrider.speculation.proposal import FinishReason
from outrider.wire.opens import open_to_pb
from outrider.wire.v1 import common_pb2

MAX_FAILURES = 4  # failures of a session on a service after which the session is not opened there again


class SessionTable:
    """The open sessions of a model, by id. Lives in one event loop.

    model: its name; empty for the only model of the gateway
    turns: in which clients get their tokens
    absence: of all targets
    """

    def __init__(
        self, placement: Placement, metrics: Metrics, turns: Turns, *, resume_timeout: float, model: str = ""
    ) -> None:
        """resume_timeout: seconds for which sessions wait for a target to come back."""
        self.model = model
        self.turns = turns
        self.absence = TargetAbsence(placement, resume_timeout, model)
        self.by_id: dict[int, Session] = {}
        self.placement = placement
        self.watches = DraftWatches()
        self._metrics = metrics
        self._resume_timeout = resume_timeout
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of sessions without a target, by id
        # The high half identifies the gateway, the low half the session.
        self._ids = itertools.count(secrets.randbits(31) << 32)

    @property
    def waiting(self) -> int:
        """Sessions that wait for a target."""
        return len(self._timers)

    @property
    def max_session_tokens(self) -> int:
        """Tokens of a session that the largest target holds, as reported last, up or not; 0 before any report."""
        targets = self.placement.targets
        return max((target.info.max_session_tokens for target in targets if target.info is not None), default=0)

    def on_target(self, target: TargetLink | None) -> list[Session]:
        """The sessions that are open on a target; with None, those that wait for one."""
        return [session for session in self.by_id.values() if session.target is target]

    def needs(self, target: TargetLink) -> bool:
        """True while a session is open on a target that drains, or has left it and has no token of its new one yet."""
        return target.load.session_count > 0 or any(one.drained_from is target for one in self.by_id.values())

    # --- opening ---

    def open(self, request: GenerationRequest, draft: DraftLink | None = None) -> Session:
        """Open a session. request: resolved. draft: the one to open it on first, instead of the best one.

        While all targets are away the session waits; raises Unavailable once they have been away for too long, if none
        of them can serve before it is sent weights, or is started with what fits, or if the pool has none.
        """
        self.absence.check()
        session = Session(next(self._ids), request, self.turns.add)
        self.by_id[session.id] = session
        if session.watch is not None:
            self.watches[session.id] = session.watch
        if request.counted:
            self._metrics.prompt_tokens.inc(session.prompt_length)
        try:
            # The draft comes first, because it determines which hidden states the target must send.
            self.open_on_draft(session, draft)
            self.open_on_target(session)
            session.stats.weight_version = self._weight_version(session)
        except BaseException:  # a session that cannot be encoded must not be tried again when a service comes back
            self.close(session)
            raise
        return session

    def _weight_version(self, session: Session) -> str:
        """Label of the weights under which a session is admitted, which stands until its first token."""
        targets = [session.target] if session.target is not None else self.placement.targets
        return next((target.weight_version for target in targets if target.weight_version), "")

    def open_on_target(self, session: Session, *, again: bool = False) -> None:
        """Open a session on a target, or let it wait for one. again: it was open before."""
        target = self.placement.place_on_target(session, again=again)
        if target is not None:
            target.open(open_on(session, target))
            if session.id in self._timers:
                self._timers.pop(session.id).cancel()
        elif session.id not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[session.id] = loop.call_later(self._resume_timeout, self._timed_out, session)

    def open_on_draft(
        self, session: Session, draft: DraftLink | None = None, *, again: bool = False
    ) -> DraftLink | None:
        """Open a session on a draft, which is returned. draft, again, None: as of Placement.place_on_draft."""
        draft = self.placement.place_on_draft(session, draft, again=again)
        if draft is not None:
            draft.open(open_to_pb(replace(session.open_message(), drafting_paused=self.placement.drafting_paused)))
        return draft

    def reopen(self, session: Session) -> None:
        """Open a session a second time on the target that has it, with the text that the client has."""
        assert session.target is not None, "only a session that is open can be opened again"
        self.placement.count_reopened(session.target)
        session.target.open(open_on(session, session.target))

    def leave_target(self, target: TargetLink, *, wait: bool) -> None:
        """Open the sessions of a target that leaves its pool, or stops, on others, with the text that clients have.

        wait: a session that no other target can take yet stays where it is; otherwise it waits for another target
        """
        for session in self.on_target(target):
            if not wait or self.placement.may_leave(session):
                session.drained_from = target if wait else None
                session.reopening.start(session.tokens)  # commits of the run that ends may still arrive
                target.close(session.id)
                self.open_on_target(session, again=True)

    # --- ending ---

    def close(self, session: Session) -> None:
        """Remove a session here and on both services. Does nothing if it has ended."""
        if session.id not in self.by_id:
            return
        if session.target is not None:
            session.target.close(session.id)
        if session.draft is not None:
            session.draft.close(session.id)
        self._remove(session)

    def finish(self, session: Session) -> None:
        """Remove a session that ended by itself; the services have removed it already."""
        if session.reopening.active and session.target is not None:
            session.target.close(session.id)
        self._remove(session)

    def fail(self, session: Session, error: OutriderError) -> None:
        """End a session with an error."""
        self.close(session)
        session.inbox.fail(error)

    def abort(self, session: Session) -> bool:
        """End a session; its client keeps the text so far. False if it has ended already."""
        if session.id not in self.by_id:
            return False
        session.commit([], 0, 0, FinishReason.ABORT)
        self.close(session)
        return True

    def abort_all(self) -> int:
        """End all sessions; their clients keep the text so far. Returns the number of sessions."""
        return sum(self.abort(session) for session in list(self.by_id.values()))

    def _remove(self, session: Session) -> None:
        del self.by_id[session.id]
        self.watches.pop(session.id, None)
        if session.id in self._timers:
            self._timers.pop(session.id).cancel()
        self.placement.leave(session)

    # --- targets come and go ---

    def target_up(self) -> None:
        """A target is up: waiting sessions are opened there, and those of targets that drain or stop."""
        self.absence.ended()
        for session in self.on_target(None):
            self.open_on_target(session, again=True)
        for target in self.placement.targets:
            if target.departing and target.up:
                self.leave_target(target, wait=True)

    def target_absent(self) -> None:
        """A target cannot be used: sessions that wait for one end at once if none can, and soon if none fits."""
        error = self.absence.none_usable() or self.absence.refused_for_long()
        if self._timers and error is not None:
            for session in self.on_target(None):
                self.fail(session, error)

    def _timed_out(self, session: Session) -> None:
        """A session has waited for a target for too long."""
        if not any(target.open_to_sessions for target in self.placement.targets):
            self.fail(session, self.absence.too_long())
            return
        tokens, seconds = session.prompt_length + session.request.stop.conditions.max_tokens, self._resume_timeout
        message = (
            f"no target that holds {tokens} tokens of prompt and answer came back in {seconds:.0f} s; ask for fewer"
        )
        self.fail(session, Unavailable(message, retry_after=bounded(seconds)))


def open_on(session: Session, target: TargetLink) -> common_pb2.OpenSession:
    """The message that opens a session on a target, with the hidden states for its draft if the target has them."""
    draft = session.draft
    wanted = draft.feature_spec if draft is not None and draft.follows(len(session.tokens)) else 0
    return open_to_pb(session.open_message(wanted if wanted in target.features.known else 0))
