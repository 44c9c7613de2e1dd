"""Sessions over services: opens them, relays between the streams, and keeps them alive when a service dies.

    1. A request opens a session on the least loaded target and draft.
    2. A frame of a target goes to the drafts as it came, and to the sessions that wait for their tokens.
    3. A frame of a draft goes to the targets as it came.
    4. A session ends with its finish reason, an error, or because its client went away; then it is closed everywhere.

When a stream is lost, its sessions wait. They are opened again, with prompt and committed tokens, on the next replica
that is up; a token depends on its path and seed alone, so the text goes on as it would have. A lost draft only means
fewer hints.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial

from gateway.metrics import Metrics
from gateway.session import Session
from gateway.streams.batches import split_commits, split_proposals
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider.serving.messages import SessionFailure
from outrider.speculation.proposal import Commit, FinishReason
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.wire import codec
from outrider.wire.v1 import draft_pb2, target_pb2

log = logging.getLogger(__name__)

RESUME_TIMEOUT = 120.0  # seconds that a session waits for a target to come back


class Orchestrator:
    """Owns the sessions and the links. Lives in one event loop."""

    def __init__(self, targets: Sequence[TargetLink], drafts: Sequence[DraftLink], metrics: Metrics) -> None:
        self.targets = list(targets)
        self.drafts = list(drafts)
        self.metrics = metrics
        self.sessions: dict[int, Session] = {}
        # The high half tells gateways apart, the low half their sessions.
        self._ids = itertools.count(secrets.randbits(31) << 32)
        for target in self.targets:
            target.on_up = partial(self._target_up, target)
            target.on_down = partial(self._target_down, target)
            target.on_frame = partial(self._from_target, target)
        for draft in self.drafts:
            self.attach_draft(draft)

    def attach_draft(self, draft: DraftLink) -> None:
        """Listen to a draft's link."""
        draft.on_up = partial(self._draft_up, draft)
        draft.on_down = partial(self._draft_down, draft)
        draft.on_frame = partial(self._from_draft, draft)

    # --- sessions ---

    def open(self, prompt: Sequence[int], sampling: SamplingParams, stop: StopConditions) -> Session:
        """Open a session. Raises Unavailable if no target is up."""
        target = self._least_loaded_target()
        if target is None:
            raise Unavailable("no target service is up at present; retry in a moment")
        session = Session(next(self._ids), prompt, sampling, stop)
        self.sessions[session.id] = session
        self.metrics.prompt_tokens.inc(len(prompt))
        self._open_on_target(session, target)
        self._open_on_draft(session)
        return session

    def close(self, session: Session) -> None:
        """Forget a session and free it on both services. Does nothing if it has ended by itself."""
        if self.sessions.pop(session.id, None) is None:
            return
        if session.target is not None:
            session.target.close(session.id)
        if session.draft is not None:
            session.draft.close(session.id)

    def _open_on_target(self, session: Session, target: TargetLink) -> None:
        session.target = target
        target.open(codec.open_to_pb(session.request()))

    def _open_on_draft(self, session: Session) -> None:
        up = [draft for draft in self.drafts if draft.up]
        session.draft = min(up, key=self._load_of, default=None)
        if session.draft is not None:
            session.draft.open(codec.open_to_pb(session.request()))

    def _load_of(self, link: TargetLink | DraftLink) -> int:
        return sum(session.target is link or session.draft is link for session in self.sessions.values())

    def _least_loaded_target(self) -> TargetLink | None:
        up = [target for target in self.targets if target.up]
        return min(up, key=self._load_of) if len(up) > 1 else next(iter(up), None)

    def _fail(self, session: Session, error: OutriderError) -> None:
        self.close(session)
        session.fail(error)

    # --- frames ---

    def _from_target(self, target: TargetLink, frame: target_pb2.VerifyResponse) -> None:
        commits = codec.commits_from_pb(frame.commits)
        self._relay_commits(frame, commits)
        tokens = verified = accepted = hits = misses = 0
        now = time.perf_counter()
        for commit in commits:
            session = self.sessions.get(commit.session_id)
            if session is None or session.target is not target:
                continue
            tokens += self._commit(session, commit, now)
            verified += commit.verified
            accepted += commit.accepted
            hits += commit.verified > 0
            misses += commit.verified == 0 and session.draft is not None
        self.metrics.commits(len(commits), tokens, verified, accepted, hits, misses)
        for message in frame.errors:
            self._target_failed(codec.failure_from_pb(message))
        self.metrics.load("target", target.address, codec.load_from_pb(frame.load))

    def _relay_commits(self, frame: target_pb2.VerifyResponse, commits: Sequence[Commit]) -> None:
        if not commits or not self.drafts:
            return
        if len(self.drafts) == 1:
            if self.drafts[0].up:
                self.drafts[0].commit(frame.commits)  # a draft ignores sessions that it does not know
            return

        def draft_of(session_id: int) -> DraftLink | None:
            session = self.sessions.get(session_id)
            return session.draft if session is not None else None

        for draft, batch in split_commits(commits, draft_of).items():
            draft.commit(batch)

    def _commit(self, session: Session, commit: Commit, now: float) -> int:
        known = len(session.tokens) - commit.base_length
        if known < 0:
            log.error("session %d lost %d tokens on the way; opening it again", session.id, -known)
            self._reopen_on_target(session)
            return 0
        new = commit.tokens.tolist()[known:]
        if not new and commit.finish_reason == FinishReason.RUNNING:
            return 0
        if session.new_tokens and new:
            self.metrics.inter_token.observe((now - session.last_commit_at) / len(new))
        session.last_commit_at = now
        session.commit(new, commit.verified, commit.accepted, commit.finish_reason)
        if session.ended:
            del self.sessions[session.id]
        return len(new)

    def _target_failed(self, failure: SessionFailure) -> None:
        session = self.sessions.get(failure.session_id)
        if session is not None:
            self._fail(session, failure.error)

    def _from_draft(self, draft: DraftLink, frame: draft_pb2.ProposeResponse) -> None:
        if frame.HasField("proposals"):
            self._relay_proposals(frame)
        for message in frame.errors:
            failure = codec.failure_from_pb(message)
            session = self.sessions.get(failure.session_id)
            if session is None or session.draft is not draft:
                continue
            log.info("session %d on the draft at %s: %s", session.id, draft.address, failure.error.message)
            session.draft = None
            if isinstance(failure.error, Unavailable):  # it asks for the session's tokens anew
                self.metrics.reopened.labels("draft").inc()
                self._open_on_draft(session)
        self.metrics.load("draft", draft.address, codec.load_from_pb(frame.load))

    def _relay_proposals(self, frame: draft_pb2.ProposeResponse) -> None:
        if len(self.targets) == 1:
            if self.targets[0].up:
                self.targets[0].propose(frame.proposals)
            return

        def target_of(session_id: int) -> TargetLink | None:
            session = self.sessions.get(session_id)
            return session.target if session is not None else None

        try:
            parts = split_proposals(frame.proposals, target_of)
        except InvalidRequest as error:
            log.warning("a draft sent proposals that cannot be read: %s", error.message)
            return
        for target, batch in parts.items():
            target.propose(batch)

    # --- services come and go ---

    def _target_up(self, target: TargetLink) -> None:
        self.metrics.service_up.labels("target", target.address).set(1)
        for session in list(self.sessions.values()):
            if session.target is None:
                self._reopen_on_target(session)

    def _target_down(self, target: TargetLink) -> None:
        self.metrics.service_up.labels("target", target.address).set(0)
        waiting = [session for session in self.sessions.values() if session.target is target]
        for session in waiting:
            session.target = None
            self._reopen_on_target(session)
        orphans = [session for session in waiting if session.target is None]
        if orphans:
            log.warning("%d sessions wait for a target to come back", len(orphans))
            asyncio.get_running_loop().call_later(RESUME_TIMEOUT, self._give_up, orphans)

    def _reopen_on_target(self, session: Session) -> None:
        target = self._least_loaded_target()
        if target is not None:
            self.metrics.reopened.labels("target").inc()
            self._open_on_target(session, target)

    def _give_up(self, orphans: Sequence[Session]) -> None:
        for session in orphans:
            if session.id in self.sessions and session.target is None:
                self._fail(session, Unavailable(f"no target service came back in {RESUME_TIMEOUT:.0f} s; retry later"))

    def _draft_up(self, draft: DraftLink) -> None:
        self.metrics.service_up.labels("draft", draft.address).set(1)
        for session in self.sessions.values():
            if session.draft is None:
                self.metrics.reopened.labels("draft").inc()
                self._open_on_draft(session)

    def _draft_down(self, draft: DraftLink) -> None:
        self.metrics.service_up.labels("draft", draft.address).set(0)
        for session in self.sessions.values():
            if session.draft is draft:
                session.draft = None
                self._open_on_draft(session)

    # --- health ---

    def missing(self) -> list[str]:
        """What cannot serve at present, in words; empty if all can."""
        missing = [] if any(target.up for target in self.targets) else ["no target service is up"]
        if self.drafts and not any(draft.up for draft in self.drafts):
            missing.append("no draft service is up; text is decoded plainly")
        return missing

    async def stop(self) -> None:
        """End all sessions and streams."""
        for session in list(self.sessions.values()):
            self._fail(session, Unavailable("the gateway is shutting down; retry elsewhere"))
        for target in self.targets:
            await target.stop()
        for draft in self.drafts:
            await draft.stop()
