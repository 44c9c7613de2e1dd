"""The core of the gateway: links to the services, open sessions, and the relays between them.

    1. A request opens a session on a target and a draft, chosen by cached prefix and by load (`session_table.py`,
       `pools/placement.py`).
    2. Frames of a target go to the drafts as bytes, and their tokens to the sessions (`target_relay.py`).
    3. Frames of a draft go to the targets as bytes (`draft_relay.py`).
    4. A session ends with its finish reason, an error, or because its client went away; then it is closed everywhere.

When a stream is lost, its sessions wait. They are opened again, with prompt and committed tokens, on the next replica
that is up. A token depends on its path and the seed alone, so the text continues unchanged. Losing a draft only costs
draft tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gateway.admission.turns import Turns
from gateway.orchestration.draft_relay import DraftRelay
from gateway.orchestration.session_table import SessionTable
from gateway.orchestration.target_relay import TargetRelay
from gateway.pools.placement import Placement
from gateway.pools.pool import Routing
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider.errors import Unavailable
from outrider.wire.v1 import common_pb2

log = logging.getLogger(__name__)

_DRAIN_POLL = 0.05  # seconds
RESUME_TIMEOUT = 120.0  # seconds for which sessions wait for a target to come back


class Orchestrator:
    """Owns the links and the sessions. Lives in one event loop."""

    def __init__(
        self,
        targets: Sequence[TargetLink],
        drafts: Sequence[DraftLink],
        metrics: Metrics,
        *,
        resume_timeout: float = RESUME_TIMEOUT,
        routing: Routing | None = None,
        turns: Turns | None = None,
        model: str = "",
    ) -> None:
        """resume_timeout: seconds for which sessions wait for a target. routing: how replicas are chosen.

        turns: of the clients of all models. model: that is served, for errors; empty for the only one
        """
        self.metrics = metrics
        placement = Placement(metrics, routing)
        turns = turns or Turns()
        self.sessions = SessionTable(placement, metrics, turns, resume_timeout=resume_timeout, model=model)
        self.targets, self.drafts = placement.targets, placement.drafts
        undelivered: list[common_pb2.CommitBatch] = []
        self._target_relay = TargetRelay(self.sessions, undelivered, metrics)
        self._draft_relay = DraftRelay(self.sessions, undelivered, metrics)
        links: list[TargetLink | DraftLink] = [*targets, *drafts]
        for link in links:
            self.attach(link)
        metrics.before_render = self._update_metrics

    @property
    def links(self) -> list[TargetLink | DraftLink]:
        """All links."""
        return [*self.targets, *self.drafts]

    def attach(self, link: TargetLink | DraftLink) -> None:
        """Add a replica. Its link may be started before or after."""
        link.stream.spacing = self.sessions.turns.spacing
        if isinstance(link, TargetLink):
            self._target_relay.attach(link)
        else:
            self._draft_relay.attach(link)

    def readmit(self, target: TargetLink) -> None:
        """Keep a target that drains; its sessions that moved stay where they are."""
        target.draining = False
        if target.up:
            self.sessions.target_up()

    async def drain(self, target: TargetLink) -> None:
        """Open a target's sessions on other ones, and wait until none is left there and all go on elsewhere."""
        self._target_relay.drain(target)
        while target.up and self.sessions.needs(target):  # noqa: ASYNC110 - sessions end in many ways, drains are rare
            await asyncio.sleep(_DRAIN_POLL)

    async def detach(self, link: TargetLink | DraftLink) -> None:
        """Remove a replica at once. Sessions that are open there go on elsewhere, or wait for another target."""
        if isinstance(link, TargetLink):
            self._target_relay.detach(link)
        else:
            self._draft_relay.detach(link)
        await link.stop()
        self.metrics.services.forget(link.service, link.address)

    async def stop(self) -> None:
        """End all sessions and streams; new sessions are refused."""
        self.sessions.absence.for_good()
        for session in list(self.sessions.by_id.values()):
            self.sessions.fail(session, Unavailable("the gateway is shutting down; retry elsewhere"))
        for link in self.links:
            await link.stop()

    def _update_metrics(self) -> None:
        services = self.metrics.services
        services.set_awaited({t.address: t.awaited_version for t in self.targets if t.awaited_version is not None})
        for link in self.links:
            services.up.labels(link.service, link.address).set(link.up)
            services.set_state(link.service, link.address, link.availability.state)
            if not link.up:
                services.remove(link.service, link.address)
            elif link.load.report is not None:
                services.update(link.service, link.address, link.load.report)
