"""Where sessions are open: chooses a target and a draft for each, and keeps count.

Any draft drafts for any target: a draft is asked for by a session, whichever target that has. Replicas of a pool need
not be equal. A session goes to a target whose context holds it to its end, so that no text ends early, and to a draft
of the first kind that has a place for it; kinds come in the order in which their drafts were named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import Counter

from gateway.pools.pool import Pool, Routing, Why
from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider.wire.opens import open_to_pb
from outrider.wire.v1 import common_pb2


class Placement:
    """The pools of both services, and who is open where. Lives in one event loop."""

    def __init__(self, metrics: Metrics, routing: Routing | None = None) -> None:
        rules = routing or Routing()
        self._targets: Pool[TargetLink] = Pool(rules)
        self._drafts: Pool[DraftLink] = Pool(rules)
        self._routed = Counter(
            "outrider_routed_sessions",
            "Sessions opened where there was a choice of replicas, by what decided: prefix, load, or busy.",
            ("service", "by"),
            registry=metrics.registry,
        )
        self._reopened = metrics.reopened

    @property
    def targets(self) -> list[TargetLink]:
        """All targets."""
        return self._targets.replicas

    @property
    def drafts(self) -> list[DraftLink]:
        """All drafts."""
        return self._drafts.replicas

    def add(self, link: TargetLink | DraftLink) -> None:
        """Take a replica on."""
        if isinstance(link, TargetLink):
            self._targets.add(link)
        else:
            self._drafts.add(link)

    def lost(self, link: TargetLink | DraftLink) -> None:
        """A replica was lost, with all that it had cached."""
        if isinstance(link, TargetLink):
            self._targets.forget(link)
        else:
            self._drafts.forget(link)

    def open_on_target(self, session: Session, *, again: bool = False) -> bool:
        """Open a session on a target, rather on one that has not refused it. False if none that is up can have it.

        again: it was open before.
        """
        fit = [link for link in self.targets if link.up and _holds(link, session)]
        target, why = self._targets.choose(session, [link for link in fit if link not in session.refused_by] or fit)
        self.move(session, target, session.draft)
        if target is None:
            return False
        self._note(target, why, again)
        self._targets.learn(session, target)
        target.open(request_of(session, target))
        return True

    def open_there(self, session: Session) -> None:
        """Open a session anew on the target that has it."""
        assert session.target is not None, "only a session that is open can be opened anew"
        self._note(session.target, None, again=True)
        session.target.open(request_of(session, session.target))

    def open_on_draft(self, session: Session, draft: DraftLink | None = None, *, again: bool = False) -> bool:
        """Open a session on a draft. False if none drafts for it, or it wants no hints.

        draft: the one to take if it is up; again: it was open before.
        """
        if session.max_draft_tokens == 0:
            return False
        why = None
        if draft is None or not draft.up:
            draft, why = self._drafts.choose(session, self._of_best_kind(session))
        self.move(session, session.target, draft)
        if draft is None:
            return False
        self._note(draft, why, again)
        self._drafts.learn(session, draft)
        loads = [target.load for target in self.targets if target.up]
        # Where hints do not pay at present, a draft need not read the prompt.
        unwanted = bool(loads) and all(load is not None and load.drafting_paused for load in loads)
        draft.open(open_to_pb(replace(session.request(), drafting_paused=unwanted)))
        return True

    def move(self, session: Session, target: TargetLink | None, draft: DraftLink | None) -> None:
        """Note where a session is open."""
        for old in (session.target, session.draft):
            if old is not None:
                old.session_count -= 1
        session.target, session.draft = target, draft
        for new in (target, draft):
            if new is not None:
                new.session_count += 1

    def leave(self, session: Session) -> None:
        """A session has ended; where it was, its text may be of use to the next one."""
        if session.target is not None:
            self._targets.learn(session, session.target)
        if session.draft is not None:
            self._drafts.learn(session, session.draft)
        self.move(session, None, None)

    def refused(self, session: Session, target: TargetLink) -> bool:
        """Note that a target has no room for a session. True if there is another one to ask."""
        session.refused_by.add(target)
        return any(link.up and link not in session.refused_by and _holds(link, session) for link in self.targets)

    def _of_best_kind(self, session: Session) -> Sequence[DraftLink]:
        """The drafts of the first kind that has a place for a session; if none has, all that are able.

        Those are able whose main drafter follows so long a session; else those that have n-grams beside it.
        """
        up, length = [link for link in self.drafts if link.up], len(session.tokens)
        able = [link for link in up if link.follows(length)] or [link for link in up if link.drafts_for(length)]
        free = [link for link in able if not link.places or link.session_count < link.places] or able
        kinds = list(dict.fromkeys(link.kind for link in self.drafts))
        best = min((link.kind for link in free), key=kinds.index, default=None)
        return [link for link in free if link.kind == best]

    def _note(self, link: TargetLink | DraftLink, why: Why | None, again: bool) -> None:
        if why is not None:
            self._routed.labels(link.service, why).inc()
        if again:
            self._reopened.labels(link.service).inc()


def request_of(session: Session, target: TargetLink) -> common_pb2.OpenSession:
    """What opens a session on a target, with the features that its draft feeds on if the target can give them."""
    draft = session.draft
    wanted = draft.feature_spec if draft is not None and draft.follows(len(session.tokens)) else 0
    return open_to_pb(session.request(wanted if wanted in target.features else 0))


def _holds(target: TargetLink, session: Session) -> bool:
    """True if a target's context holds a session to its end."""
    longest = target.info.max_session_tokens if target.info is not None else 0
    return not longest or session.prompt_length + session.stop.max_tokens <= longest
