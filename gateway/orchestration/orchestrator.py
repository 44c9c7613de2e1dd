"""Sessions over services: opens them, relays between the streams, and keeps them alive when a service dies.

    1. A request opens a session on a target and a draft, chosen by what they have cached and by load (`pools/`).
    2. A frame of a target goes to the drafts as it came, and to the sessions that wait for their tokens. One that
       cannot be read goes nowhere, and the target is told again which text its sessions have.
    3. What drafts say goes to the targets (`drafting.py`).
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
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gateway.admission.retry_after import bounded
from gateway.orchestration import feature_relay as feeding
from gateway.orchestration.drafting import ATTEMPTS, Drafting
from gateway.pools.placing import Placement
from gateway.pools.pool import Routing
from gateway.sessions.draft_watch import Watches
from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink, logprobs_of
from gateway.streams.unreadable import Unreadable
from gateway.telemetry.metrics import Metrics
from outrider.errors import InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.serving.messages import SessionFailure
from outrider.speculation.proposal import FinishReason, Logprobs
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.wire import codec
from outrider.wire.v1 import common_pb2, target_pb2

log = logging.getLogger(__name__)

_AT_ONCE = 4  # sessions that are told of a step before the streams are looked after again
_LOSSES = 5  # of targets, after which a session is not opened again
RESUME_TIMEOUT = 120.0  # seconds that sessions wait for a target to come back

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
        routing: Routing | None = None,
    ) -> None:
        """resume_timeout: seconds that sessions wait for a target to come back. routing: which one gets a session."""
        self.places = Placement(metrics, routing)
        self.metrics = metrics
        self.sessions: dict[int, Session] = {}
        self._watches = Watches()
        self._telling: list[common_pb2.CommitBatch] = []
        self._drafting = Drafting(self.places, self.sessions, self._telling, self._watches, metrics)
        self._unreadable = Unreadable(metrics.unreadable_frames, "frames", "they are dropped, in part or whole")
        self._resume_timeout = resume_timeout
        self._alone_since: float | None = None  # by the loop's clock; while no target is up
        self._waiting: dict[int, asyncio.TimerHandle] = {}  # sessions without a target, by id
        # The high half tells gateways apart, the low half their sessions.
        self._ids = itertools.count(secrets.randbits(31) << 32)
        for target in targets:
            self.places.add(target)
            self._unreadable.attach(target)
            target.on_up = partial(self._target_up, target)
            target.on_down = partial(self._target_down, target)
            target.on_frame = partial(self._from_target, target)
        for draft in drafts:
            self.attach_draft(draft)
        metrics.before_render = self._sample

    @property
    def targets(self) -> list[TargetLink]:
        """Links to all targets."""
        return self.places.targets

    @property
    def drafts(self) -> list[DraftLink]:
        """Links to all drafts."""
        return self.places.drafts

    @property
    def longest(self) -> int:
        """Tokens of a session that the largest target holds, by what each said last; 0 as long as none has."""
        return max((target.info.max_session_tokens for target in self.targets if target.info is not None), default=0)

    @property
    def links(self) -> list[TargetLink | DraftLink]:
        """All links."""
        return [*self.targets, *self.drafts]

    def attach_draft(self, draft: DraftLink) -> None:
        """Take a draft's link on."""
        self._drafting.attach(draft)

    # --- sessions ---

    def open(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stop: StopConditions,
        draft: DraftLink | None = None,
        **options: Any,
    ) -> Session:
        """Open a session. draft: the one to begin with, instead of the one that suits. options: those of Session.

        While targets are away it waits; raises Unavailable once they have been for too long.
        """
        if self._nobody_comes():
            raise self._nobody()
        session = Session(next(self._ids), prompt, sampling, stop, **options)
        self.sessions[session.id] = session
        if session.watch is not None:
            self._watches[session.id] = session.watch
        if session.counted:
            self.metrics.prompt_tokens.inc(len(prompt))
        try:
            # First, for its draft says which features the target is asked for.
            self.places.open_on_draft(session, draft)
            self._open_on_target(session)
        except BaseException:  # one that cannot be said must not be said again whenever a service comes back
            self.close(session)
            raise
        return session

    def close(self, session: Session) -> None:
        """Forget a session and free it on both services. Does nothing if it has ended by itself."""
        if session.id not in self.sessions:
            return
        if session.target is not None:
            session.target.close(session.id)
        if session.draft is not None:
            session.draft.close(session.id)
        self._forget(session)

    def abort_all(self) -> int:
        """End all sessions; their clients keep what they have got. Returns how many there were."""
        return sum(self.abort(session) for session in list(self.sessions.values()))

    def abort(self, session: Session) -> bool:
        """End a session. False if it has ended already."""
        if session.id not in self.sessions:
            return False
        session.commit([], 0, 0, FinishReason.ABORT)
        self.close(session)
        return True

    def _open_on_target(self, session: Session, *, again: bool = False) -> None:
        """Open a session on a target, or let it wait for one. again: it was open before."""
        opened = self.places.open_on_target(session, again=again)
        if opened and session.id in self._waiting:
            self._waiting.pop(session.id).cancel()
        elif not opened and session.id not in self._waiting:
            loop = asyncio.get_running_loop()
            self._waiting[session.id] = loop.call_later(self._resume_timeout, self._waited, session)

    def _end(self, session: Session) -> None:
        """Forget a session that ended by itself; the services have forgotten it, too."""
        if session.lingers and session.target is not None:
            session.target.close(session.id)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        del self.sessions[session.id]
        self._watches.pop(session.id, None)
        if session.id in self._waiting:
            self._waiting.pop(session.id).cancel()
        self.places.leave(session)

    def _fail(self, session: Session, error: OutriderError) -> None:
        self.close(session)
        session.fail(error)

    # --- frames of a target ---

    async def _from_target(self, target: TargetLink, frame: target_pb2.VerifyResponse) -> None:
        target.heard(frame.load)  # whoever hears of a commit finds what it left behind
        try:
            # Before drafts hear of it, to whom it goes joined to those of other targets.
            rows, told = list(codec.commit_rows(frame.commits)), logprobs_of(frame)
        except InvalidRequest as error:
            self._unreadable.note(target, error)
            self._told_nothing(target)
            return
        if rows:
            for draft in self.drafts:
                if draft.up and draft.session_count:
                    draft.commit(frame.commits)  # a draft ignores sessions that it does not know
        if frame.features.session_ids:
            try:
                feeding.relay(frame.features, self.sessions, self.drafts, self.metrics)
            except InvalidRequest as error:  # drafts see that they are missing, and texts need none
                self._unreadable.note(target, error)
        if rows:
            self._telling.append(frame.commits)
            try:
                await self._tell(target, frame.load.weight_version, rows, told)
            finally:
                self._telling.remove(frame.commits)
        for failed in frame.errors:
            self._target_failed(target, codec.failure_from_pb(failed))

    async def _tell(
        self,
        target: TargetLink,
        version: str,
        rows: Sequence[codec.CommitRow],
        told: Mapping[int, Sequence[Logprobs]],
    ) -> None:
        """Tell sessions what was committed, some at a time: their clients' work must not hold up what drafts say."""
        await asyncio.sleep(0)  # first of all the drafts hear of it
        now = time.perf_counter()
        together: dict[int, int] = {}  # tokens of each session in the frame, until the first of its commits is counted
        for session_id, _, tokens, *_ in rows:
            together[session_id] = together.get(session_id, 0) + len(tokens)
        for place, (session_id, base, tokens, root_hash, verified, accepted, finish, cached) in enumerate(rows):
            if place and place % _AT_ONCE == 0:
                await asyncio.sleep(0)
            session = self.sessions.get(session_id)
            if session is None or session.target is not target or not self._agrees(session, base, tokens, root_hash):
                continue
            session.weight_version = version
            if cached and not session.steps:
                session.cached_tokens = cached
                self.metrics.tally.cached += cached if session.counted else 0
            logprobs = None
            for group in told.get(place, ()):
                if group.first < base:
                    session.prompt_told = group
                else:
                    logprobs = group
            self._commit(
                session, base, tokens, verified, accepted, _FINISH_REASONS[finish], now,
                together.pop(session_id, 0), logprobs,
            )  # fmt: skip

    def _agrees(self, session: Session, base: int, tokens: Sequence[int], root_hash: int) -> bool:
        """True if a commit is of the text that the client has been told. A target with another one is told it, once."""
        lost = base - len(session.tokens)
        if lost <= 0 and session.continues(base, tokens, root_hash):
            session.strayed = False
            return True
        if not session.strayed:
            what = f"{lost} tokens were lost on the way" if lost > 0 else "opened anew, the target has another text"
            log.warning("session %d: %s; opening it again", session.id, what)
            self._open_anew(session)
        return False

    def _open_anew(self, session: Session) -> None:
        """Open a session on its target once more, with the text that the client has been told."""
        session.linger()
        session.strayed = True
        self.places.open_there(session)

    def _told_nothing(self, target: TargetLink) -> None:
        """What a frame said is lost, be it the end of a session: nobody knows of which ones it spoke."""
        for session in list(self.sessions.values()):
            if session.target is target and not self._lost_too_often(session, "a frame was lost"):
                self._open_anew(session)

    def _commit(
        self,
        session: Session,
        base: int,
        tokens: list[int],
        verified: int,
        accepted: int,
        finish: FinishReason,
        now: float,
        together: int,
        logprobs: Logprobs | None,
    ) -> None:
        known = len(session.tokens) - base
        new = tokens[known:] if known else tokens
        if not new and finish is FinishReason.RUNNING:
            return
        if new and session.counted:
            self.metrics.count(session, len(new), verified, accepted, now, together)
        session.commit(new, verified, accepted, finish, logprobs.behind(known) if logprobs and known else logprobs)
        if finish is not FinishReason.RUNNING:
            self._end(session)

    def _target_failed(self, target: TargetLink, failure: SessionFailure) -> None:
        session = self.sessions.get(failure.session_id)
        if session is None or session.target is not target:
            return
        self.places.move(session, None, session.draft)  # the target has forgotten it
        session.target_failures += 1
        # Unavailable asks for the tokens anew; a full target sends them to others; other errors would come again.
        if isinstance(failure.error, Unavailable) and session.target_failures < ATTEMPTS:
            self._open_on_target(session, again=True)
        elif isinstance(failure.error, Overloaded) and self.places.refused(session, target):
            self._open_on_target(session)
        else:
            self._fail(session, failure.error)
        if session.lingers and session.target is not target:  # it may have been another run of it that failed
            target.close(session.id)

    # --- services come and go ---

    def _target_up(self, target: TargetLink) -> None:
        self._unreadable.connected(target)
        self.metrics.service_up.labels("target", target.address).set(1)
        self._alone_since = None
        for session in self.sessions.values():
            if session.target is None:
                self._open_on_target(session, again=True)

    def _target_down(self, target: TargetLink) -> None:
        self.metrics.service_up.labels("target", target.address).set(0)
        self.places.lost(target)
        if not any(link.up for link in self.targets):
            log.warning("%d sessions wait for a target to come back", len(self.sessions))
            self._alone_since = asyncio.get_running_loop().time()
        for session in list(self.sessions.values()):
            if session.target is target:
                self._lost(session)

    def _lost(self, session: Session) -> None:
        """A session's target is lost: others go on with it, unless it may be what ends them."""
        if not self._lost_too_often(session, "a target was lost"):
            self._open_on_target(session, again=True)

    def _lost_too_often(self, session: Session, what: str) -> bool:
        """Count a loss. True if it was one too many, and the session has failed."""
        session.losses += 1
        if session.losses < _LOSSES:
            return False
        message = f"{session.losses} times {what} that had this request, without a token in between"
        self._fail(session, Unavailable(f"{message}; look at the target's log before it is sent again"))
        return True

    def _waited(self, session: Session) -> None:
        """A session has waited for a target for too long."""
        if not any(target.up for target in self.targets):
            self._fail(session, self._nobody())
            return
        tokens, seconds = session.prompt_length + session.stop.max_tokens, self._resume_timeout
        message = (
            f"no target that holds {tokens} tokens of prompt and answer came back in {seconds:.0f} s; ask for fewer"
        )
        self._fail(session, Unavailable(message, retry_after=bounded(seconds)))

    def _nobody_comes(self) -> bool:
        """True if all targets have been away for too long."""
        if self._alone_since is None:
            return False
        return asyncio.get_running_loop().time() >= self._alone_since + self._resume_timeout

    def _nobody(self) -> Unavailable:
        now = asyncio.get_running_loop().time()
        away = now - self._alone_since if self._alone_since is not None else 0.0
        message = f"no target service came back in {self._resume_timeout:.0f} s; retry later"
        return Unavailable(message, retry_after=bounded(away))

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
            if not link.up:
                self.metrics.away(link.service, link.address)
            elif link.load is not None:
                self.metrics.load(link.service, link.address, link.load)

    async def stop(self) -> None:
        """End all sessions and streams."""
        for session in list(self.sessions.values()):
            self._fail(session, Unavailable("the gateway is shutting down; retry elsewhere"))
        for link in self.links:
            await link.stop()


def _refusals(links: Sequence[TargetLink] | Sequence[DraftLink]) -> str:
    return "".join(f"; {link.refusal.message}" for link in links if link.refusal is not None)
