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
from dataclasses import replace
from functools import partial
from typing import Any

from gateway import feeding
from gateway.metrics import Metrics
from gateway.session import Session
from gateway.streams.batches import split_proposals
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.watch import Watches
from outrider.errors import InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.serving.messages import SessionFailure
from outrider.speculation.proposal import FinishReason, Logprobs
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.wire import codec
from outrider.wire.opens import open_to_pb
from outrider.wire.v1 import common_pb2, draft_pb2, target_pb2

log = logging.getLogger(__name__)

RESUME_TIMEOUT = 120.0  # seconds that sessions wait for a target to come back
_ATTEMPTS = 4  # times that a service may lose track of a session before it is believed to do so always

_FINISH_REASONS = {int(reason): reason for reason in FinishReason}


class Orchestrator:
    """Owns the sessions and the links. Lives in one event loop."""

    def __init__(
        self,
        targets: Sequence[TargetLink],
        drafts: Sequence[DraftLink],
        metrics: Metrics,
        *,
        resume_timeout: float = RESUME_TIMEOUT,
    ) -> None:
        """resume_timeout: seconds that sessions wait for a target to come back."""
        self.targets = list(targets)
        self.drafts: list[DraftLink] = []
        self.metrics = metrics
        self.sessions: dict[int, Session] = {}
        self._watches = Watches()
        self._resume_timeout = resume_timeout
        self._gave_up = False  # no target is up, and none came back in time
        self._giving_up: asyncio.TimerHandle | None = None
        # The high half tells gateways apart, the low half their sessions.
        self._ids = itertools.count(secrets.randbits(31) << 32)
        for target in self.targets:
            target.on_up = partial(self._target_up, target)
            target.on_down = partial(self._target_down, target)
            target.on_frame = partial(self._from_target, target)
        for draft in drafts:
            self.attach_draft(draft)
        metrics.before_render = self._sample

    @property
    def links(self) -> list[TargetLink | DraftLink]:
        """All links."""
        return [*self.targets, *self.drafts]

    def attach_draft(self, draft: DraftLink) -> None:
        """Take a draft's link on."""
        self.drafts.append(draft)
        draft.on_up = partial(self._draft_up, draft)
        draft.on_down = partial(self._draft_down, draft)
        draft.on_frame = partial(self._from_draft, draft)
        draft.before_up = partial(self._configure_features, draft)

    # --- sessions ---

    def open(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stop: StopConditions,
        draft: DraftLink | None = None,
        **options: Any,
    ) -> Session:
        """Open a session. draft: the one to begin with, instead of the least loaded. options: those of Session.

        While targets are away it waits; raises Unavailable once they have been for too long.
        """
        if self._gave_up:
            raise self._nobody()
        session = Session(next(self._ids), prompt, sampling, stop, **options)
        self.sessions[session.id] = session
        if session.watch is not None:
            self._watches[session.id] = session.watch
        if session.counted:
            self.metrics.prompt_tokens.inc(len(prompt))
        self._open_on_draft(session, draft)  # first, for its draft says which features the target is asked for
        self._open_on_target(session)
        return session

    def close(self, session: Session) -> None:
        """Forget a session and free it on both services. Does nothing if it has ended by itself."""
        if self.sessions.pop(session.id, None) is None:
            return
        self._watches.pop(session.id, None)
        if session.target is not None:
            session.target.close(session.id)
        if session.draft is not None:
            session.draft.close(session.id)
        self._move(session, None, None)

    def abort_all(self) -> int:
        """End all sessions; their clients keep what they have got. Returns how many there were."""
        sessions = list(self.sessions.values())
        for session in sessions:
            self.abort(session)
        return len(sessions)

    def abort(self, session: Session) -> None:
        """End a session, unless it has ended by itself."""
        if session.finish is FinishReason.RUNNING:
            session.commit([], 0, 0, FinishReason.ABORT)
            self.close(session)

    def _open_on_target(self, session: Session) -> bool:
        """Open a session on the least loaded target, rather on one that has not refused it. False if none is up."""
        up = (link for link in self.targets if link.up)
        target = min(up, key=lambda link: (link in session.refused_by, link.session_count), default=None)
        self._move(session, target, session.draft)
        if target is not None:
            target.open(_request_of(session, target))
        return target is not None

    def _open_on_draft(self, session: Session, draft: DraftLink | None = None) -> bool:
        """Open a session on a draft, by default the least loaded. False if none is up, or it wants no hints."""
        if session.max_draft_tokens == 0:
            return False
        if draft is None or not draft.up:
            draft = min((link for link in self.drafts if link.up), key=lambda link: link.session_count, default=None)
        self._move(session, session.target, draft)
        if draft is not None:
            loads = [target.load for target in self.targets if target.up]
            # Where hints do not pay at present, a draft need not read the prompt.
            unwanted = bool(loads) and all(load is not None and load.hints_unwanted for load in loads)
            draft.open(open_to_pb(replace(session.request(), hints_unwanted=unwanted)))
        return draft is not None

    def _move(self, session: Session, target: TargetLink | None, draft: DraftLink | None) -> None:
        """Note where a session is open."""
        for old in (session.target, session.draft):
            if old is not None:
                old.session_count -= 1
        session.target, session.draft = target, draft
        for new in (target, draft):
            if new is not None:
                new.session_count += 1

    def _end(self, session: Session) -> None:
        """Forget a session that ended by itself; the services have forgotten it, too."""
        del self.sessions[session.id]
        self._watches.pop(session.id, None)
        if session.lingers and session.target is not None:
            session.target.close(session.id)
        self._move(session, None, None)

    def _fail(self, session: Session, error: OutriderError) -> None:
        self.close(session)
        session.fail(error)

    # --- frames of a target ---

    def _from_target(self, target: TargetLink, frame: target_pb2.VerifyResponse) -> None:
        if frame.commits.session_ids:
            for draft in self.drafts:
                if draft.up:
                    draft.commit(frame.commits)  # a draft ignores sessions that it does not know
            now = time.perf_counter()
            told = _logprobs(frame)
            rows = enumerate(codec.commit_rows(frame.commits))
            for place, (session_id, base, tokens, verified, accepted, finish, cached) in rows:
                session = self.sessions.get(session_id)
                if session is not None and session.target is target:
                    session.weight_version = frame.load.weight_version
                    if cached and not session.steps:
                        session.cached_tokens = cached
                        self.metrics.tally.cached += cached if session.counted else 0
                    logprobs = None
                    for group in told.get(place, ()):
                        if group.first < base:
                            session.prompt_told = group
                        else:
                            logprobs = group
                    self._commit(session, base, tokens, verified, accepted, _FINISH_REASONS[finish], now, logprobs)
        if frame.features.session_ids:
            feeding.relay(frame.features, self.sessions, self.drafts, self.metrics)
        for error in frame.errors:
            self._target_failed(target, codec.failure_from_pb(error))
        target.load = frame.load

    def _commit(
        self,
        session: Session,
        base: int,
        tokens: list[int],
        verified: int,
        accepted: int,
        finish: FinishReason,
        now: float,
        logprobs: Logprobs | None,
    ) -> None:
        known = len(session.tokens) - base
        if known < 0:
            log.error("session %d lost %d tokens on the way; opening it again", session.id, -known)
            self._reopen_on_target(session)
            return
        new = tokens[known:] if known else tokens
        if not new and finish is FinishReason.RUNNING:
            return
        if new and session.counted:
            self.metrics.count(session, len(new), verified, accepted, now)
        session.commit(new, verified, accepted, finish, logprobs.behind(known) if logprobs and known else logprobs)
        if finish is not FinishReason.RUNNING:
            self._end(session)

    def _target_failed(self, target: TargetLink, failure: SessionFailure) -> None:
        session = self.sessions.get(failure.session_id)
        if session is None or session.target is not target:
            return
        self._move(session, None, session.draft)  # the target has forgotten it
        session.target_failures += 1
        # Unavailable asks for the tokens anew; a full target sends them to others; other errors would come again.
        if isinstance(failure.error, Unavailable) and session.target_failures < _ATTEMPTS:
            self._reopen_on_target(session)
        elif isinstance(failure.error, Overloaded) and self._others(session, target):
            self._open_on_target(session)
        else:
            self._fail(session, failure.error)

    def _others(self, session: Session, target: TargetLink) -> bool:
        """Note that a target has no room for a session. True if there is another one to ask."""
        session.refused_by.add(target)
        return any(link.up and link not in session.refused_by for link in self.targets)

    # --- features ---

    async def _configure_features(self, draft: DraftLink) -> None:
        """Let the targets know what a draft feeds on. Raises ConfigError if one that is up cannot give it."""
        assert draft.features is not None, "a draft that feeds on nothing asks for nothing"
        for target in self.targets:
            await target.configure(draft.features)

    def _feed_again(self, session: Session) -> None:
        """Ask the target for all of a session's features: it opens the session once more, and computes it anew."""
        session.features_until = 0
        if session.target is not None and session.draft is not None and session.draft.feature_spec:
            session.lingers = True
            session.target.open(_request_of(session, session.target))

    # --- frames of a draft ---

    def _from_draft(self, draft: DraftLink, frame: draft_pb2.ProposeResponse) -> None:
        if frame.proposals.session_ids:
            self._relay_proposals(draft, frame)
            self._watches.see(frame.proposals)
        for error in frame.errors:
            self._draft_failed(draft, codec.failure_from_pb(error))
        draft.load = frame.load

    def _relay_proposals(self, draft: DraftLink, frame: draft_pb2.ProposeResponse) -> None:
        if len(self.targets) == 1:
            if self.targets[0].up:
                self.targets[0].propose(frame.proposals)
            return

        def target_of(session_id: int) -> TargetLink | None:
            session = self.sessions.get(session_id)
            return session.target if session is not None else None

        try:
            for target, batch in split_proposals(frame.proposals, target_of).items():
                target.propose(batch)
        except InvalidRequest as error:
            log.warning("the draft at %s sent proposals that cannot be read: %s", draft.address, error.message)

    def _draft_failed(self, draft: DraftLink, failure: SessionFailure) -> None:
        session = self.sessions.get(failure.session_id)
        if session is None or session.draft is not draft:
            return
        log.info("session %d on the draft at %s: %s", session.id, draft.address, failure.error.message)
        self._move(session, session.target, None)
        session.draft_failures += 1
        if isinstance(failure.error, Unavailable) and session.draft_failures < _ATTEMPTS:
            self._reopen_on_draft(session)

    # --- services come and go ---

    def _target_up(self, target: TargetLink) -> None:
        self.metrics.service_up.labels("target", target.address).set(1)
        self._gave_up = False
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        for session in self.sessions.values():
            if session.target is None:
                self._reopen_on_target(session)

    def _target_down(self, target: TargetLink) -> None:
        self.metrics.service_up.labels("target", target.address).set(0)
        for session in self.sessions.values():
            if session.target is target:
                self._reopen_on_target(session)
        if not any(link.up for link in self.targets):
            log.warning("%d sessions wait for a target to come back", len(self.sessions))
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._resume_timeout, self._give_up)

    def _reopen_on_target(self, session: Session) -> None:
        if self._open_on_target(session):
            self.metrics.reopened.labels("target").inc()

    def _give_up(self) -> None:
        self._gave_up = True
        for session in list(self.sessions.values()):
            self._fail(session, self._nobody())

    def _nobody(self) -> Unavailable:
        return Unavailable(f"no target service came back in {self._resume_timeout:.0f} s; retry later")

    def _draft_up(self, draft: DraftLink) -> None:
        self.metrics.service_up.labels("draft", draft.address).set(1)
        for session in self.sessions.values():
            if session.draft is None and session.draft_failures < _ATTEMPTS:
                self._reopen_on_draft(session)

    def _draft_down(self, draft: DraftLink) -> None:
        self.metrics.service_up.labels("draft", draft.address).set(0)
        for session in self.sessions.values():
            if session.draft is draft:
                self._reopen_on_draft(session)

    def _reopen_on_draft(self, session: Session) -> None:
        if self._open_on_draft(session):
            self.metrics.reopened.labels("draft").inc()
            self._feed_again(session)

    # --- health ---

    def missing(self) -> list[str]:
        """What cannot serve at present, in words; empty if all can."""
        missing = []
        if not any(target.up for target in self.targets):
            missing.append("target: no target service is up" + _refusals(self.targets))
        if self.drafts and not any(draft.up for draft in self.drafts):
            missing.append("draft: no draft service is up; text is decoded plainly" + _refusals(self.drafts))
        return missing

    def _sample(self) -> None:
        for link in self.links:
            self.metrics.service_up.labels(link.service, link.address).set(link.up)
            if link.load is not None:
                self.metrics.load(link.service, link.address, link.load)

    async def stop(self) -> None:
        """End all sessions and streams."""
        for session in list(self.sessions.values()):
            self._fail(session, Unavailable("the gateway is shutting down; retry elsewhere"))
        if self._giving_up is not None:
            self._giving_up.cancel()
        for link in self.links:
            await link.stop()


def _request_of(session: Session, target: TargetLink) -> common_pb2.OpenSession:
    """What opens a session on a target, with the features that its draft feeds on if the target can give them."""
    draft = session.draft
    wanted = draft.feature_spec if draft is not None and draft.follows(len(session.tokens)) else 0
    return open_to_pb(session.request(wanted if wanted in target.features else 0))


def _logprobs(frame: target_pb2.VerifyResponse) -> dict[int, list[Logprobs]]:
    """Log-probabilities in a frame, by the place of their commit."""
    groups: dict[int, list[Logprobs]] = {}
    if frame.HasField("logprobs"):
        for place, group in codec.logprobs_from_pb(frame.logprobs):
            groups.setdefault(place, []).append(group)
    return groups


def _refusals(links: Sequence[TargetLink] | Sequence[DraftLink]) -> str:
    return "".join(f"; {link.refusal.message}" for link in links if link.refusal is not None)
