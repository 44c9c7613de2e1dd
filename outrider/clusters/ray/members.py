"""The pools of a gateway, brought in line with the replicas that run, by its own `/workers` routes.

The controller owns what the API has added to its gateways: an address that no unit has is removed, and drains there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.clusters.load import Listing
from outrider.clusters.ray.units import HostHandle, HostLost

log = logging.getLogger(__name__)

_OK, _ACCEPTED, _NOT_FOUND = 200, 202, 404
_API = ["api"]  # sources of a replica that only the API has added

Members = Mapping[str, str]
"""The replicas of both pools: "target" or "draft" by address."""


@dataclass(frozen=True)
class GatewayView:
    """What a gateway answers: its replicas, and its page of metrics."""

    workers: Listing
    metrics: str

    def lists(self, address: str) -> bool:
        """True if a replica is a member, or drains."""
        return any(one["address"] == address for one in self.workers)


async def bring_in_line(gateway: HostHandle, wanted: Members) -> GatewayView | None:
    """Add and remove replicas of a gateway until it has those that are wanted. None if it does not answer.

    New replicas are added first, so that sessions of one that leaves find room.
    """
    try:
        workers = await _listing(gateway)
        if workers is None:
            return None
        known = {one["address"]: one for one in workers}
        for address, service in wanted.items():
            if address not in known or known[address]["state"] == "draining":
                await _change(gateway, "POST", "/workers", {"url": address, "worker_type": service})
        for address, one in known.items():
            if address not in wanted and one["sources"] == _API:
                await _change(gateway, "DELETE", f"/workers/{address}")
        status, page = await gateway.call("ask", "GET", "/metrics")
        return GatewayView(workers, page if status == _OK else "")
    except (HostLost, OSError) as error:
        log.debug("a gateway does not answer: %s", error)
        return None


async def remove_now(gateway: HostHandle, address: str) -> None:
    """Remove a replica without waiting for its sessions."""
    try:
        await _change(gateway, "DELETE", f"/workers/{address}?drain=false")
    except (HostLost, OSError) as error:
        log.debug("a gateway does not answer: %s", error)


async def _listing(gateway: HostHandle) -> list[dict[str, Any]] | None:
    status, body = await gateway.call("ask", "GET", "/workers")
    if status != _OK:
        return None
    workers: list[dict[str, Any]] = json.loads(body)["workers"]
    return workers


async def _change(gateway: HostHandle, method: str, route: str, body: Mapping[str, str] | None = None) -> None:
    status, answer = await gateway.call("ask", method, route, body)
    if status not in (_ACCEPTED, _NOT_FOUND):
        log.warning("%s %s: the gateway answers %d: %s", method, route, status, answer[:300])
