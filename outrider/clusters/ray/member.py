"""A unit as the controller knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.clusters.ray.units import HostHandle, HostLost, HostStatus, Unit
from outrider.errors import OutriderError

_STATUS_SECONDS = 2.0


@dataclass(eq=False)
class Member:
    """A unit and what is known of it.

    statuses: of its processes, None while an actor does not answer. address: of its service, the last known one
    problem: why an actor does not answer. unplaced: why Ray has not placed it; empty if it has. leaving: since when it
    leaves. failed: when its start last failed. work: a start or stop in progress
    stop_seconds: for a call that stops a process
    """

    unit: Unit
    stop_seconds: float
    statuses: list[HostStatus | None] = field(default_factory=list)
    address: str = ""
    problem: str = ""
    unplaced: str = ""
    leaving: float | None = None
    failed: float | None = None
    work: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """True while its processes are being started or stopped."""
        return self.work is not None and not self.work.done()

    @property
    def state(self) -> str:
        """In a word: pending, lost, idle, starting, ready, failed, or leaving."""
        if self.leaving is not None:
            return "leaving"
        if self.unplaced:
            return "pending"
        found = [self._missing if one is None else one.state for one in self.statuses] or [self._missing]
        return next((state for state in ("failed", "lost", "idle", "starting") if state in found), "ready")

    @property
    def _missing(self) -> str:
        """The state of a process whose actor does not answer."""
        return "lost" if self.address else "starting"

    @property
    def reason(self) -> str:
        """Why it is not ready."""
        reasons = [one.reason for one in self.statuses if one is not None and one.reason]
        return self.unplaced or self.problem or "; ".join(dict.fromkeys(reasons))

    @property
    def _missing_reason(self) -> str:
        return self.unplaced or (self.problem if self.address else "")

    @property
    def running(self) -> list[HostHandle]:
        """The actors whose process runs."""
        pairs = zip(self.unit.hosts, self.statuses, strict=False)
        return [host for host, one in pairs if one is not None and one.state in ("starting", "ready")]

    async def look(self) -> None:
        """Ask its actors for their processes."""
        if self.busy or (self.unplaced and not self.statuses):  # its actors wait for a place
            return
        found = await asyncio.gather(*(_status(host) for host in self.unit.hosts))
        self.statuses = [one if isinstance(one, HostStatus) else None for one in found]
        self.problem = next((one for one in found if isinstance(one, str)), "")
        first = self.statuses[0]
        if first is not None and first.state != "idle":
            self.address = first.address

    async def stop(self) -> None:
        """Stop its processes."""
        if self.statuses:
            await asyncio.gather(*(_stop(host, self.stop_seconds) for host in self.unit.hosts))

    def described(self, sessions: Mapping[str, int]) -> Iterator[dict[str, Any]]:
        """Its processes, for people. sessions: by address."""
        for index, status in enumerate(self.statuses or [None] * len(self.unit.hosts)):
            address = status.address if status is not None else "" if index else self.address
            of_unit = self.state in ("pending", "leaving")
            yield {
                "unit": self.unit.name,
                "kind": str(self.unit.kind),
                "process": index,
                "state": self.state if of_unit else self._missing if status is None else status.state,
                "node": status.node if status is not None else "",
                "address": address,
                "sessions": sessions.get(address, 0),
                "restarts": status.restarts if status is not None else 0,
                "reason": status.reason if status is not None and status.reason else self._missing_reason,
            }


async def _status(host: HostHandle) -> HostStatus | str:
    """The status of an actor's process, or why there is none."""
    try:
        found: HostStatus = await host.call("status", seconds=_STATUS_SECONDS)
    except (HostLost, OutriderError, OSError) as error:
        return str(error)
    return found


async def _stop(host: HostHandle, seconds: float) -> None:
    try:
        await host.call("stop", seconds=seconds)
    except (HostLost, OutriderError, OSError):  # its process ends with the actor
        return
