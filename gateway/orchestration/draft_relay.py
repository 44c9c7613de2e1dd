"""Frames of drafts: relays their proposals to the targets as bytes.

With one target a frame is relayed as it is, with several it is split by session. A frame that cannot be decoded is
dropped, because the target's frame is joined from those of all drafts. Losing a draft costs draft tokens only: its
sessions are opened on another draft, or on the same one when it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from gateway.orchestration.session_table import MAX_FAILURES, SessionTable, open_on
from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from gateway.streams.frames import split_proposals
from gateway.streams.target import TargetLink
from gateway.streams.unreadable_frames import UnreadableFrames
from gateway.telemetry.metrics import Metrics
from outrider.errors import InvalidRequest, Unavailable
from outrider.serving.messages import SessionFailure
from outrider.wire import codec
from outrider.wire.v1 import common_pb2, draft_pb2

log = logging.getLogger(__name__)

_FORGIVEN_AFTER = 256  # tokens between two failures of a session after which earlier failures no longer count


class DraftRelay:
    """Handles frames, connections and losses of drafts. Lives in one event loop."""

    def __init__(self, table: SessionTable, undelivered: Sequence[common_pb2.CommitBatch], metrics: Metrics) -> None:
        """undelivered: commits that drafts have received and some sessions have not."""
        self._table = table
        self._placement = table.placement
        self._undelivered = undelivered
        self._metrics = metrics.services
        self._traffic = metrics.traffic
        self._unreadable = UnreadableFrames(self._metrics.unreadable_proposals, "proposals", "they are dropped")

    def attach(self, draft: DraftLink) -> None:
        """Add a draft."""
        self._placement.add(draft)
        self._unreadable.attach(draft)
        draft.stream.traffic = self._traffic
        draft.events.up = partial(self._up, draft)
        draft.events.down = partial(self._down, draft)
        draft.stream.on_frame = partial(self._receive, draft)
        draft.before_up = partial(self._configure_features, draft)

    def detach(self, draft: DraftLink) -> None:
        """Remove a draft; its sessions are opened on others, or decode plainly."""
        draft.draining = True
        sessions = [session for session in self._table.by_id.values() if session.draft is draft]
        self._open_again(sessions)
        for session in sessions:
            draft.close(session.id)
        self._placement.remove(draft)
        self._unreadable.detach(draft)
        self._drop_features()

    # --- frames ---

    async def _receive(self, draft: DraftLink, frame: draft_pb2.ProposeResponse) -> None:
        if frame.proposals.session_ids and self._readable(draft, frame.proposals):
            self._relay(frame.proposals)
            self._table.watches.merge(frame.proposals)
        for error in frame.errors:
            self._failed(draft, codec.failure_from_pb(error))
        draft.update_load(frame.load)

    def _readable(self, draft: DraftLink, batch: common_pb2.ProposalBatch) -> bool:
        """False for proposals that cannot be decoded."""
        try:
            codec.check_proposals(batch)
        except InvalidRequest as error:
            self._unreadable.add(draft, error)
            return False
        return True

    def _relay(self, batch: common_pb2.ProposalBatch) -> None:
        targets = self._placement.targets
        if len(targets) == 1:
            if targets[0].up:
                targets[0].propose(batch)
            return

        def target_of(session_id: int) -> TargetLink | None:
            session = self._table.by_id.get(session_id)
            return session.target if session is not None else None

        for target, part in split_proposals(batch, target_of).items():
            target.propose(part)

    def _failed(self, draft: DraftLink, failure: SessionFailure) -> None:
        session = self._table.by_id.get(failure.session_id)
        if session is None or session.draft is not draft:
            return
        log.info("session %d on the draft at %s: %s", session.id, draft.address, failure.error.message)
        self._placement.move(session, session.target, None)
        failures = session.failures
        if len(session.tokens) - failures.draft_at >= _FORGIVEN_AFTER:  # a busy draft may run out of pages repeatedly
            failures.draft = 0
        failures.draft += 1
        failures.draft_at = len(session.tokens)
        if isinstance(failure.error, Unavailable) and failures.draft < MAX_FAILURES:
            self._open_again([session])

    # --- connections ---

    def _up(self, draft: DraftLink) -> None:
        self._unreadable.connected(draft)
        self._metrics.up.labels("draft", draft.address).set(1)
        free = [session for session in self._table.by_id.values() if session.draft is None]
        self._open_again([session for session in free if session.failures.draft < MAX_FAILURES])

    def _down(self, draft: DraftLink) -> None:
        self._metrics.up.labels("draft", draft.address).set(0)
        self._placement.lost(draft)
        self._open_again([session for session in self._table.by_id.values() if session.draft is draft])

    def _open_again(self, sessions: Sequence[Session]) -> None:
        """Open sessions on drafts, and send those the commits that some of the sessions have not received yet."""
        drafts: dict[DraftLink, None] = {}
        for session in sessions:
            if (draft := self._table.open_on_draft(session, again=True)) is not None:
                self._request_features(session)
                drafts[draft] = None
        for draft in drafts:
            for batch in self._undelivered:
                draft.commit(batch)

    # --- hidden states ---

    async def _configure_features(self, draft: DraftLink) -> None:
        """Register at the targets the hidden states that a draft needs. Raises ConfigError if one cannot send them."""
        assert draft.features is not None, "called only for drafts that need hidden states"
        self._drop_features()  # of a head that was replaced
        for target in list(self._placement.targets):
            await target.configure(draft.features)

    def _drop_features(self) -> None:
        """Drop the specifications of hidden states that no draft needs any more."""
        wanted = {link.feature_spec for link in self._placement.drafts}
        for target in self._placement.targets:
            target.features.keep(wanted)

    def _request_features(self, session: Session) -> None:
        """Make the target send all of a session's hidden states: it opens the session again and recomputes them."""
        session.features_end = 0
        if session.target is None:
            return
        message = open_on(session, session.target)
        if message.feature_spec:  # otherwise no draft needs the computation
            session.reopening.start(session.tokens)
            session.target.open(message)
