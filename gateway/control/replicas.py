"""The replicas of a model's two pools, as control routes show and change them, in all workers of the gateway.

Each worker has streams of its own, and moves its own sessions. A decision reaches the other workers at once; a worker
that starts later, or that was too busy to answer, asks the others for what was decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from gateway.orchestration.orchestrator import Orchestrator
from gateway.pools.addresses import check_address
from gateway.pools.discovery import Discovery
from gateway.pools.members import Decision, Member, Service, id_of
from gateway.streams.availability import Availability, ReplicaState
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.workers.peers import Answers, Peers
from outrider.errors import ConfigError, InvalidRequest, NotFound

_CATCH_UP = 30.0  # seconds between two questions to the other workers what was decided
COMING = "coming"
"""The state of a replica that is in no pool but `next`'s."""

_COMING = "the changed table of its model names it, which holds once a target of it is up"
_WAITING = Availability(ReplicaState.UNREACHABLE, "it is connected once a target is up")


class Replicas:
    """Lists, adds and removes replicas.

    next: of the pools that are to replace these, as a changed table of the models does once a target of it is up
    former: of the pools that these have replaced, as long as sessions run there
    """

    def __init__(self, discovery: Discovery, orchestrator: Orchestrator, peers: Peers, model: str = "") -> None:
        """model: whose pools these are; empty for the only model."""
        self._model = model
        self._members = discovery.members
        self._discovery = discovery
        self._orchestrator = orchestrator
        self._peers = peers
        self.next: Replicas | None = None
        self.former: list[Replicas] = []

    # --- the list ---

    async def listed(self) -> list[dict[str, Any]]:
        """All replicas, also those that drain; sessions are those of all workers."""
        found = {one["id"]: one for one in self.own()}
        for listed in (await self._peers.ask("replicas")).values():
            for one in listed:
                known = found.setdefault(one["id"], one)
                if known is not one:
                    known["sessions"] += one["sessions"]
        return list(found.values())

    async def find(self, name: str) -> dict[str, Any]:
        """A replica by its id, or by its address. Raises NotFound."""
        listed = await self.listed()
        with contextlib.suppress(ConfigError):
            address = check_address(name)
            listed.sort(key=lambda one: one["address"] != address)
            if listed and listed[0]["address"] == address:
                return listed[0]
        for one in listed:
            if one["id"] == name:
                return one
        raise NotFound(f"no replica {name!r} is in a pool; GET /workers lists them")

    def own(self) -> list[dict[str, Any]]:
        """The replicas as this worker sees them. Those in the pools of `next` have their state there at `next`.

        Sessions are also those of the former pools, whose replicas drain unless they are in these pools, too.
        """
        found = {one["id"]: one | {"next": None} for one in self._present()}
        for one in (replica for former in self.former for replica in former._present()):
            known = found.setdefault(one["id"], one | {"next": None, "sessions": 0})
            known["sessions"] += one["sessions"]
        for one in self.next._present() if self.next is not None else ():
            shown = found.get(one["id"], one | {"state": COMING, "reason": _COMING})
            found[one["id"]] = shown | {"next": {"state": one["state"], "reason": one["reason"]}}
        return list(found.values())

    def _present(self) -> list[dict[str, Any]]:
        links = {(link.service, link.address): link for link in self._orchestrator.links}
        found = [self._described(member, links.pop((member.service, member.address), None)) for member in self._members]
        return found + [self._described(None, link) for link in links.values()]  # those that drain

    def _described(self, member: Member | None, link: TargetLink | DraftLink | None) -> dict[str, Any]:
        availability = link.availability if link is not None else _WAITING
        service = link.service if link is not None else member.service if member is not None else ""
        address = link.address if link is not None else member.address if member is not None else ""
        load = link.load.report if link is not None and link.up else None
        return {
            "id": id_of(service, address, self._model),
            "service": service,
            "address": address,
            "sources": list(member.sources) if member is not None else [],
            "state": availability.state,
            "reason": availability.reason or None,
            "sessions": link.load.session_count if link is not None else 0,
            "max_sessions": link.max_sessions if link is not None else 0,
            "running_sessions": load.running_sessions if load is not None else 0,
            "waiting_sessions": load.waiting_sessions if load is not None else 0,
            "step_seconds": round(link.load.step_time.seconds, 6) if link is not None else 0.0,
            "weights": link.weights._asdict() if isinstance(link, DraftLink) and link.weights is not None else None,
            "model": link.info.model.model_path if link is not None and link.info is not None else None,
        }

    @property
    def failed_sources(self) -> list[dict[str, str]]:
        """DNS names and files that cannot be read at present, and why."""
        failures = self._discovery.failures | (self.next._discovery.failures if self.next is not None else {})
        return [{"service": service, "source": name, "reason": reason} for (service, name), reason in failures.items()]

    # --- pools that these replace ---

    def replace(self, former: Replicas) -> None:
        """These are the replicas of a model from now on; sessions of those that were before run on in these pools."""
        former.next = None
        self.former += [former, *former.former]
        former.former = []
        self._members.lead(former._members)

    def release(self, former: Replicas) -> None:
        """No session of those replicas is left."""
        if former in self.former:
            self.former.remove(former)
            self._members.release(former._members)

    # --- changes ---

    async def add(self, service: Service, address: str) -> tuple[str, str]:
        """Add a replica; it is used once it is up and fits. Returns its id and address. Raises InvalidRequest."""
        try:
            address = check_address(address)
        except ConfigError as error:
            raise InvalidRequest(error.message, param="url") from None
        await self._decide(service, address, added=True)
        return id_of(service, address, self._model), address

    async def remove(self, name: str, *, drain: bool) -> dict[str, Any]:
        """Remove a replica. Raises NotFound.

        drain: its sessions go on elsewhere first, or to their end where no other replica can take them
        """
        one = await self.find(name)
        await self._decide(Service(one["service"]), one["address"], added=False, drain=drain)
        return one

    async def _decide(self, service: Service, address: str, *, added: bool, drain: bool = True) -> None:
        before = self._members.decision(service, address)
        after = before.stamp[0] + 1 if before is not None else 0  # the clock may have been set back
        stamp = max(time.time_ns(), after), self._peers.index
        self._members.decide(Decision(service, address, added, drain, stamp))
        if (known := self._members.decision(service, address)) is not None:
            await self._peers.ask("decide", known.to_json())

    # --- other workers ---

    @property
    def answers(self) -> Answers:
        """Handlers of the other workers' requests."""
        return {
            "replicas": lambda _: self.own(),
            "decide": lambda asked: self._members.decide(Decision.from_json(asked)),
            "decisions": lambda _: [decision.to_json() for decision in self._members.decisions],
        }

    async def catch_up(self) -> None:
        """Take what was decided in other workers."""
        for decisions in (await self._peers.ask("decisions")).values():
            for decision in sorted(map(Decision.from_json, decisions), key=lambda one: one.stamp):
                self._members.take(decision)

    async def keep_up(self) -> None:
        """Catch up again and again, until cancelled."""
        while self._peers.several:
            await asyncio.sleep(_CATCH_UP)
            await self.catch_up()
