"""Where sessions are open: chooses a target and a draft for each session, and counts sessions per replica.

Any draft can serve any target: proposals follow the session, whichever target runs it. But each step of a target costs
a frame for each draft that its sessions have, so sessions of a draft go to the same targets where loads allow it.

Replicas of a pool need not be equal. A session goes to a target whose context holds it to its end, so that no text ends
early, and to a draft of the first kind with a free admission slot; kinds are ordered as their drafts were named.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Collection, Sequence

from prometheus_client import Counter

from gateway.pools.pool import Pool, Routing, RoutingReason
from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics


class Placement:
    """The pools of both services. Lives in one event loop."""

    def __init__(self, metrics: Metrics, routing: Routing | None = None) -> None:
        rules = routing or Routing()
        self._targets: Pool[TargetLink] = Pool(rules)
        self._drafts: Pool[DraftLink] = Pool(rules)
        self._shared: dict[TargetLink, Count[DraftLink]] = {}  # sessions of each target by draft
        self._routed = Counter(
            "outrider_routed_sessions",
            "Sessions opened with a choice of replicas, by the deciding rule: prefix, load, or busy.",
            ("service", "by"),
            registry=metrics.registry,
        )
        self._reopened = metrics.services.reopened

    @property
    def targets(self) -> list[TargetLink]:
        """All targets."""
        return self._targets.replicas

    @property
    def drafts(self) -> list[DraftLink]:
        """All drafts."""
        return self._drafts.replicas

    def drafts_of(self, target: TargetLink) -> Collection[DraftLink]:
        """The drafts on which sessions of a target are open."""
        return self._shared[target].keys() if target in self._shared else ()

    def add(self, link: TargetLink | DraftLink) -> None:
        """Add a replica."""
        if isinstance(link, TargetLink):
            self._targets.add(link)
        else:
            self._drafts.add(link)

    def remove(self, link: TargetLink | DraftLink) -> None:
        """Remove a replica on which no session is open."""
        if isinstance(link, TargetLink):
            self._targets.remove(link)
        else:
            self._drafts.remove(link)

    def lost(self, link: TargetLink | DraftLink) -> None:
        """A replica was lost, with everything that it had cached."""
        if isinstance(link, TargetLink):
            self._targets.clear_prefixes(link)
        else:
            self._drafts.clear_prefixes(link)

    def place_on_target(self, session: Session, *, again: bool = False) -> TargetLink | None:
        """The target that a session is to be opened on, preferably one that has not refused it; None if none that is up
        can run it.

        again: the session was open before
        """
        fit = [link for link in self.targets if self._may_open(session, link)]
        refused, drained = session.failures.refused_by, session.drained_from
        free = [link for link in fit if link not in refused]
        able = [link for link in free if link is not drained] or free or fit
        beside = {link for link in able if session.draft in self.drafts_of(link)}
        target, reason = self._targets.choose(session, able, beside)
        self.move(session, target, session.draft)
        if target is not None:
            self._count(target, reason, again)
            self._targets.add_prefix(session, target)
        return target

    def place_on_draft(
        self, session: Session, draft: DraftLink | None = None, *, again: bool = False
    ) -> DraftLink | None:
        """The draft that a session is to be opened on; None if none serves it, or if it allows no draft service.

        draft: the one to use if it is up. again: the session was open before
        """
        if not session.request.uses_draft_service:
            return None
        reason = None
        if draft is None or not draft.open_to_sessions:
            draft, reason = self._drafts.choose(session, self._of_best_kind(session))
        self.move(session, session.target, draft)
        if draft is not None:
            self._count(draft, reason, again)
            self._drafts.add_prefix(session, draft)
        return draft

    @property
    def drafting_paused(self) -> bool:
        """True if drafting is paused on all targets that are up: a draft need not read a prompt."""
        loads = [target.load.report for target in self.targets if target.up]
        return bool(loads) and all(load is not None and load.drafting_paused for load in loads)

    def move(self, session: Session, target: TargetLink | None, draft: DraftLink | None) -> None:
        """Record where a session is open."""
        for old in (session.target, session.draft):
            if old is not None:
                old.load.session_count -= 1
        self._share(session, -1)
        session.target, session.draft = target, draft
        self._share(session, 1)
        for new in (target, draft):
            if new is not None:
                new.load.session_count += 1

    def leave(self, session: Session) -> None:
        """A session has ended; its replicas keep its text in their prefix caches."""
        if session.target is not None:
            self._targets.add_prefix(session, session.target)
        if session.draft is not None:
            self._drafts.add_prefix(session, session.draft)
        self.move(session, None, None)

    def refused(self, session: Session, target: TargetLink) -> bool:
        """Record that a target has no room for a session. True if another target may have some."""
        refused = session.failures.refused_by
        refused.add(target)
        return any(link not in refused and self._may_open(session, link) for link in self.targets)

    def may_leave(self, session: Session) -> bool:
        """True if another target than the one that it is open on can hold a session and has not refused it."""
        others = (link for link in self.targets if link is not session.target and link.open_to_sessions)
        return any(link not in session.failures.refused_by and _holds(link, session) for link in others)

    def _may_open(self, session: Session, target: TargetLink) -> bool:
        """True if a session may be opened on a target: one that drains takes back only sessions that it had."""
        return target.up and _holds(target, session) and (not target.departing or target is session.drained_from)

    def _of_best_kind(self, session: Session) -> Sequence[DraftLink]:
        """The drafts of the first kind with a free slot for a session; without a free slot, all able drafts.

        A draft is able if its main drafter supports the session's length; else if it has n-grams beside that one.
        """
        up, length = [link for link in self.drafts if link.open_to_sessions], len(session.tokens)
        able = [link for link in up if link.follows(length)] or [link for link in up if link.drafts_for(length)]
        free = [link for link in able if not link.max_sessions or link.load.session_count < link.max_sessions] or able
        kinds = {link: link.kind for link in self.drafts}
        present = {kinds[link] for link in free}
        best = next((kind for kind in kinds.values() if kind in present), None)
        return [link for link in free if kinds[link] == best]

    def _share(self, session: Session, change: int) -> None:
        """Count a session that a target and a draft share, or no longer share."""
        target, draft = session.target, session.draft
        if target is None or draft is None:
            return
        drafts = self._shared.setdefault(target, Count())
        drafts[draft] += change
        if not drafts[draft]:
            del drafts[draft]
        if not drafts:
            del self._shared[target]

    def _count(self, link: TargetLink | DraftLink, reason: RoutingReason | None, again: bool) -> None:
        if reason is not None:
            self._routed.labels(link.service, reason).inc()
        if again:
            self.count_reopened(link)

    def count_reopened(self, link: TargetLink | DraftLink) -> None:
        """A session is opened once more on a replica."""
        self._reopened.labels(link.service).inc()


def _holds(target: TargetLink, session: Session) -> bool:
    """True if a target's context holds a session to its end."""
    longest = target.info.max_session_tokens if target.info is not None else 0
    return not longest or session.prompt_length + (session.request.stop.max_tokens or 1) <= longest
