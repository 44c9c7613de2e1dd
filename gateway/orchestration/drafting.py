"""The drafts' part in sessions: their hints go to targets, their failures and returns concern nobody else.

A frame of a draft goes to the targets as it came, or in parts where there are several. One that cannot be read goes
nowhere: on its way it is joined to those of other drafts, which would be lost with it. A lost draft only means fewer
hints: its sessions are opened on another one, or on the same once it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from gateway.pools.placing import Placement, request_of
from gateway.sessions.draft_watch import Watches
from gateway.sessions.session import Session
from gateway.streams.batches import split_proposals
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.streams.unreadable import Unreadable
from gateway.telemetry.metrics import Metrics
from outrider.errors import InvalidRequest, Unavailable
from outrider.serving.messages import SessionFailure
from outrider.wire import codec
from outrider.wire.v1 import common_pb2, draft_pb2

log = logging.getLogger(__name__)

ATTEMPTS = 4  # times that a service may lose track of a session before it is believed to do so always
_FORGIVEN = 256  # tokens that it has followed a session between two losses, for the first ones not to count any more


class Drafting:
    """Listens to drafts. Lives in one event loop."""

    def __init__(
        self,
        places: Placement,
        sessions: Mapping[int, Session],
        telling: Sequence[common_pb2.CommitBatch],
        watches: Watches,
        metrics: Metrics,
    ) -> None:
        """sessions: all that are open, by id. telling: commits that drafts have heard of, and some sessions not yet."""
        self._places = places
        self._sessions = sessions
        self._telling = telling
        self._watches = watches
        self._metrics = metrics
        self._unreadable = Unreadable(metrics.unreadable, "hints", "they are dropped")

    def attach(self, draft: DraftLink) -> None:
        """Take a draft's link on."""
        self._places.add(draft)
        self._unreadable.attach(draft)
        draft.on_up = partial(self._up, draft)
        draft.on_down = partial(self._down, draft)
        draft.on_frame = partial(self._take, draft)
        draft.before_up = partial(self._configure_features, draft)

    # --- frames ---

    async def _take(self, draft: DraftLink, frame: draft_pb2.ProposeResponse) -> None:
        if frame.proposals.session_ids and self._readable(draft, frame.proposals):
            self._relay(frame.proposals)
            self._watches.see(frame.proposals)
        for error in frame.errors:
            self._failed(draft, codec.failure_from_pb(error))
        draft.load = frame.load

    def _readable(self, draft: DraftLink, batch: common_pb2.ProposalBatch) -> bool:
        """False for hints that cannot be read."""
        try:
            codec.check_proposals(batch)
        except InvalidRequest as error:
            self._unreadable.note(draft, error)
            return False
        return True

    def _relay(self, batch: common_pb2.ProposalBatch) -> None:
        targets = self._places.targets
        if len(targets) == 1:
            if targets[0].up:
                targets[0].propose(batch)
            return

        def target_of(session_id: int) -> TargetLink | None:
            session = self._sessions.get(session_id)
            return session.target if session is not None else None

        for target, part in split_proposals(batch, target_of).items():
            target.propose(part)

    def _failed(self, draft: DraftLink, failure: SessionFailure) -> None:
        session = self._sessions.get(failure.session_id)
        if session is None or session.draft is not draft:
            return
        log.info("session %d on the draft at %s: %s", session.id, draft.address, failure.error.message)
        self._places.move(session, session.target, None)
        if len(session.tokens) - session.draft_failed_at >= _FORGIVEN:  # a busy draft runs out of pages now and then
            session.draft_failures = 0
        session.draft_failures += 1
        session.draft_failed_at = len(session.tokens)
        if isinstance(failure.error, Unavailable) and session.draft_failures < ATTEMPTS:
            self._open_again([session])

    # --- coming and going ---

    def _up(self, draft: DraftLink) -> None:
        self._unreadable.connected(draft)
        self._metrics.service_up.labels("draft", draft.address).set(1)
        free = [session for session in self._sessions.values() if session.draft is None]
        self._open_again([session for session in free if session.draft_failures < ATTEMPTS])

    def _down(self, draft: DraftLink) -> None:
        self._metrics.service_up.labels("draft", draft.address).set(0)
        self._places.lost(draft)
        self._open_again([session for session in self._sessions.values() if session.draft is draft])

    def _open_again(self, sessions: Sequence[Session]) -> None:
        """Open sessions on drafts, and repeat there what some of them lack: they are being told of it."""
        drafts: dict[DraftLink, None] = {}
        for session in sessions:
            if self._places.open_on_draft(session, again=True) and session.draft is not None:
                self._feed_again(session)
                drafts[session.draft] = None
        for draft in drafts:
            for batch in self._telling:
                draft.commit(batch)

    # --- features ---

    async def _configure_features(self, draft: DraftLink) -> None:
        """Let the targets know what a draft feeds on. Raises ConfigError if one that is up cannot give it."""
        assert draft.features is not None, "a draft that feeds on nothing asks for nothing"
        wanted = {link.feature_spec for link in self._places.drafts}
        for target in self._places.targets:
            target.configure_no_more(wanted)  # a head that is replaced leaves its fusion behind
            await target.configure(draft.features)

    def _feed_again(self, session: Session) -> None:
        """Ask the target for all of a session's features: it opens the session once more, and computes it anew."""
        session.features_until = 0
        if session.target is None:
            return
        request = request_of(session, session.target)
        if request.feature_spec:  # else it would be computed for nobody
            session.linger()
            session.target.open(request)
