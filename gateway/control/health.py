"""The state of the system: whether it can serve, and what became of each service."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.admission.admission import Admission
from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.availability import Availability, ReplicaState
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink

OK, DEGRADED, UNAVAILABLE = "ok", "degraded", "unavailable"

_DRAINING = "gateway: it is shutting down"
_MAX_REPORT = 2000  # characters of a supervisor's report


@dataclass(frozen=True)
class Health:
    """What the health routes report of a model's pools.

    draft_reports: files with the reason of a draft process that ended, by address
    """

    orchestrator: Orchestrator
    admission: Admission
    draft_reports: Mapping[str, Path] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """True if requests can be served, with a draft or without."""
        targets = self.orchestrator.targets
        return any(target.open_to_sessions for target in targets) and not self.admission.draining

    def state(self) -> dict[str, Any]:
        """The full state: ok, degraded, or unavailable; each service with its reason.

        degraded: without a configured draft, or while a target awaits weights. awaited_weights: their label
        """
        orchestrator = self.orchestrator
        targets, drafts = self.services(orchestrator.targets), self.services(orchestrator.drafts)
        missing = _missing(targets, "target", "no target service is up") if targets else ["target: the pool is empty"]
        if self.ready:
            missing += [f"target: {one['reason']}" for one in targets if one["state"] == ReplicaState.AWAITING_WEIGHTS]
        missing += _missing(drafts, "draft", "no draft service is up; text is decoded plainly")
        if self.admission.draining:
            missing.append(_DRAINING)
        status = UNAVAILABLE if not self.ready else DEGRADED if missing else OK
        body: dict[str, Any] = {"status": status}
        if missing:
            body["missing"] = missing
        awaited = {link.awaited_version for link in orchestrator.targets} - {None}
        if awaited:
            body["awaited_weights"] = sorted(filter(None, awaited))
        return body | {"targets": targets, "drafts": drafts}

    def services(self, links: Sequence[TargetLink] | Sequence[DraftLink]) -> list[dict[str, Any]]:
        """Address, state and reason of each replica; the reason is null for one that is ready."""
        found = ((link.address, self.availability(link)) for link in links)
        return [{"address": address, "state": one.state, "reason": one.reason or None} for address, one in found]

    def availability(self, link: TargetLink | DraftLink) -> Availability:
        """Whether a replica is used. The reason of a process that ended is the one that its supervisor reports."""
        found = link.availability
        report = self.draft_reports.get(link.address) if link.service == "draft" else None
        if report is None or found.state is not ReplicaState.UNREACHABLE:
            return found
        with contextlib.suppress(OSError):
            return Availability(found.state, report.read_text(encoding="utf-8")[:_MAX_REPORT])
        return found


def _missing(services: Sequence[dict[str, Any]], name: str, text: str) -> list[str]:
    """A message with all reasons if no replica of a service is ready; none if the service has no replicas."""
    if not services or any(service["state"] == ReplicaState.READY for service in services):
        return []
    return [f"{name}: " + "; ".join([text, *(service["reason"] for service in services if service["reason"])])]
