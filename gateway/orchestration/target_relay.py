"""Frames of targets: relays their commits to the drafts as bytes, and delivers the tokens to the sessions.

A frame that cannot be decoded is dropped, and its target is sent the text of all its sessions again. A target that is
lost loses its sessions to other targets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from gateway.orchestration import feature_relay
from gateway.orchestration.session_table import MAX_FAILURES, SessionTable
from gateway.sessions.session import Session
from gateway.streams.target import TargetLink
from gateway.streams.unreadable_frames import UnreadableFrames
from gateway.telemetry.metrics import Metrics
from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.serving.messages import SessionFailure
from outrider.speculation.proposal import FinishReason, Logprobs
from outrider.wire import codec
from outrider.wire.v1 import common_pb2, target_pb2

log = logging.getLogger(__name__)

COMMITS_AT_ONCE = 64  # commits that sessions receive before the event loop does other work
_MAX_LOSSES = 5  # of targets or frames without a token in between, after which a session fails

_FINISH_REASONS = {int(reason): reason for reason in FinishReason}


class TargetRelay:
    """Handles frames, connections and losses of targets. Lives in one event loop."""

    def __init__(self, table: SessionTable, undelivered: list[common_pb2.CommitBatch], metrics: Metrics) -> None:
        """undelivered: commits that drafts have received and some sessions have not; kept up to date here."""
        self._table = table
        self._undelivered = undelivered
        self._metrics = metrics
        self._unreadable = UnreadableFrames(
            metrics.services.unreadable_frames, "frames", "they are dropped, in part or whole"
        )

    def attach(self, target: TargetLink) -> None:
        """Add a target."""
        self._table.placement.add(target)
        self._unreadable.attach(target)
        target.stream.traffic = self._metrics.traffic
        target.events.up = partial(self._up, target)
        target.events.down = partial(self._down, target)
        target.events.absent = self._table.target_absent
        target.events.stopping = partial(self._stopping, target)
        target.stream.on_frame = partial(self._receive, target)
        for draft in self._table.placement.drafts:
            if draft.features is not None:
                target.features.add(draft.features)

    def drain(self, target: TargetLink) -> None:
        """Open a target's sessions on others; those that no other can take stay until one can, or until they end."""
        target.draining = True
        self._none_left()
        self._table.leave_target(target, wait=True)

    def detach(self, target: TargetLink) -> None:
        """Remove a target; sessions that are still open there wait for another one."""
        target.draining, target.up = True, False
        self._none_left()
        self._table.leave_target(target, wait=False)
        self._table.placement.remove(target)
        self._unreadable.detach(target)

    # --- frames ---

    async def _receive(self, target: TargetLink, frame: target_pb2.VerifyResponse) -> None:
        target.update_load(frame.load)  # first, so that the load is there when a client sees the commit
        try:
            # Before drafts receive the frame, because theirs is joined with frames of other targets.
            rows, logprobs = list(codec.commit_rows(frame.commits)), _logprobs_of(frame)
        except InvalidRequest as error:
            self._unreadable.add(target, error)
            self._frame_lost(target)
            return
        placement = self._table.placement
        if rows:
            for draft in placement.drafts_of(target):
                if draft.up:
                    draft.commit(frame.commits)  # a draft ignores sessions that it does not have
        if frame.features.session_ids:
            try:
                feature_relay.relay(frame.features, self._table.by_id, placement, self._metrics.services)
            except InvalidRequest as error:  # drafts detect the gap; texts do not need hidden states
                self._unreadable.add(target, error)
        if rows:
            self._undelivered.append(frame.commits)
            try:
                await self._deliver(target, frame.load.weight_version, rows, logprobs)
            finally:
                self._undelivered.remove(frame.commits)
        for failed in frame.errors:
            self._failed(target, codec.failure_from_pb(failed))

    async def _deliver(
        self,
        target: TargetLink,
        version: str,
        rows: Sequence[codec.CommitRow],
        logprobs: Mapping[int, Sequence[Logprobs]],
    ) -> None:
        """Append commits to their sessions, whose clients get them in turns. logprobs: by index of the commit."""
        await asyncio.sleep(0)  # the drafts' frames are written first
        now = time.perf_counter()
        together: dict[int, int] = {}  # tokens of each session in the frame, removed with the first of its commits
        for session_id, _, tokens, *_ in rows:
            together[session_id] = together.get(session_id, 0) + len(tokens)
        sessions = self._table.by_id
        for index, (session_id, base, tokens, root_hash, verified, accepted, finish, cached, source) in enumerate(rows):
            if index and index % COMMITS_AT_ONCE == 0:
                await asyncio.sleep(0)
            session = sessions.get(session_id)
            if session is None or session.target is not target or not self._continues(session, base, tokens, root_hash):
                continue
            session.stats.weight_version = version
            if cached and not session.stats.steps:
                session.stats.cached_tokens = cached
                self._metrics.tally.cached += cached if session.request.counted else 0
            own = None
            for group in logprobs.get(index, ()):
                if group.first < base:
                    session.inbox.prompt_logprobs = group
                else:
                    own = group
            self._commit(
                session, base, tokens, verified, accepted, source, _FINISH_REASONS[finish], now,
                together.pop(session_id, 0), own,
            )  # fmt: skip

    def _continues(self, session: Session, base: int, tokens: Sequence[int], root_hash: int) -> bool:
        """True if a commit continues the text that the client has. Otherwise the target is sent that text, once."""
        lost = base - len(session.tokens)
        reopening = session.reopening
        if lost <= 0 and reopening.accepts(session.tokens, base, tokens, root_hash):
            reopening.diverged = False
            return True
        if not reopening.diverged:
            reason = (
                f"{lost} tokens were lost" if lost > 0 else "after it was opened again, the target has another text"
            )
            log.warning("session %d: %s; opening it again", session.id, reason)
            self._reopen(session)
        return False

    def _commit(
        self,
        session: Session,
        base: int,
        tokens: list[int],
        verified: int,
        accepted: int,
        source: int,
        finish: FinishReason,
        now: float,
        together: int,
        logprobs: Logprobs | None,
    ) -> None:
        known = len(session.tokens) - base
        new = tokens[known:] if known else tokens
        if not new and finish is FinishReason.RUNNING:
            return
        if new and session.request.counted:
            self._metrics.count(session, len(new), verified, accepted, now, together, source)
        own = logprobs.behind(known) if logprobs and known else logprobs
        session.commit(new, verified, accepted, finish, own, source)
        if finish is not FinishReason.RUNNING:
            self._table.finish(session)

    def _reopen(self, session: Session) -> None:
        """Open a session on its target a second time, with the text that the client has."""
        session.reopening.start(session.tokens)
        session.reopening.diverged = True
        self._table.reopen(session)

    # --- failures ---

    def _failed(self, target: TargetLink, failure: SessionFailure) -> None:
        table = self._table
        session = table.by_id.get(failure.session_id)
        if session is None or session.target is not target:
            return
        table.placement.move(session, None, session.draft)  # the target has removed it
        session.failures.target += 1
        # Unavailable asks for the tokens again; a full target leaves the session to others; other errors would recur.
        if isinstance(failure.error, Unavailable) and session.failures.target < MAX_FAILURES:
            table.open_on_target(session, again=True)
        elif isinstance(failure.error, Overloaded) and table.placement.refused(session, target):
            table.open_on_target(session)
        else:
            table.fail(session, failure.error)
        if session.reopening.active and session.target is not target:  # the other run may still be open there
            target.close(session.id)

    def _frame_lost(self, target: TargetLink) -> None:
        """A frame could not be decoded, so it is unknown which sessions it was about, or whether one ended."""
        for session in self._table.on_target(target):
            if not self._lost_too_often(session, "a frame was lost"):
                self._reopen(session)

    def _lost_too_often(self, session: Session, event: str) -> bool:
        """Count a loss. True if it was one too many, and the session has failed: it may cause the losses."""
        session.failures.losses += 1
        losses = session.failures.losses
        if losses < _MAX_LOSSES:
            return False
        message = f"{losses} times {event} that had this request, without a token in between"
        self._table.fail(session, Unavailable(f"{message}; look at the target's log before it is sent again"))
        return True

    # --- connections ---

    def _up(self, target: TargetLink) -> None:
        self._unreadable.connected(target)
        self._metrics.services.up.labels("target", target.address).set(1)
        self._table.target_up()

    def _stopping(self, target: TargetLink) -> None:
        """A target stops, or serves again after all."""
        if target.stopping:
            self._none_left()
            self._table.leave_target(target, wait=True)
        elif target.open_to_sessions:
            self._table.target_up()

    def _down(self, target: TargetLink) -> None:
        table = self._table
        self._metrics.services.up.labels("target", target.address).set(0)
        table.placement.lost(target)
        self._none_left()
        for session in table.on_target(target):
            if not self._lost_too_often(session, "a target was lost"):
                table.open_on_target(session, again=True)

    def _none_left(self) -> None:
        """Record it if no target is left for new sessions."""
        table = self._table
        if not any(link.open_to_sessions for link in table.placement.targets):
            log.warning("no target is left for new sessions; %d are open", len(table.by_id))
            table.absence.began()


def _logprobs_of(frame: target_pb2.VerifyResponse) -> dict[int, list[Logprobs]]:
    """Log-probabilities in a frame, by the index of their commit. Raises InvalidRequest."""
    groups: dict[int, list[Logprobs]] = {}
    if frame.HasField("logprobs"):
        for index, group in codec.logprobs_from_pb(frame.logprobs):
            groups.setdefault(index, []).append(group)
    return groups
