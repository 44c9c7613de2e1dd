"""Who is a member of each pool, and why: flags, DNS, files and the API name replicas by address.

A replica is a member while anything names it, and no longer once the API has removed it. A removal holds until the
API adds the replica again, or until nothing else names it; so a replica that DNS names again later is new.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gateway.pools.addresses import Kind, Named

log = logging.getLogger(__name__)

API = "api"  # what names a replica that the API added


class Service(StrEnum):
    """The two pools."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True)
class Member:
    """A replica of a pool.

    sources: what names it: flags as they were given, or `api`. rank: the place of the first of them among the flags
    host: its DNS name; empty for a replica that was named by address. named: an address among the flags names it
    """

    service: Service
    address: str
    sources: tuple[str, ...]
    rank: int
    host: str = ""
    named: bool = False


@dataclass(frozen=True)
class Decision:
    """What the API last set for a replica.

    drain: of a removal: its sessions leave gradually. stamp: orders decisions, over all workers of a gateway
    hides: of a removal: a flag, a DNS name or a file names the replica, and it stays removed as long as that lasts
    """

    service: Service
    address: str
    added: bool
    drain: bool
    stamp: tuple[int, int]
    hides: bool = False

    def to_json(self) -> dict[str, Any]:
        """The decision for other workers."""
        return {
            "service": self.service, "address": self.address, "added": self.added, "drain": self.drain,
            "stamp": list(self.stamp), "hides": self.hides,
        }  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Decision:
        """A decision of another worker."""
        time, worker = content["stamp"]
        return cls(
            Service(content["service"]), content["address"], content["added"], content["drain"], (time, worker),
            content["hides"],
        )  # fmt: skip


def id_of(service: str, address: str, model: str = "") -> str:
    """The id of a replica: a UUID that depends on these alone, so that all workers of a gateway agree on it.

    model: whose pool it is in; empty for a gateway with one model
    """
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"outrider:{service}:{address}" + (f":{model}" if model else "")))


Joined = Callable[[Member], None]
Left = Callable[[Member, bool], None]


class Members:
    """The members of both pools. Lives in one event loop.

    next: those that are to replace these, which take each decision, too; None if these stay
    """

    def __init__(self, targets: Iterable[Named] = (), drafts: Iterable[Named] = (), model: str = "") -> None:
        """targets, drafts: what the flags name, in their order. Addresses among them are members from now on.

        model: whose pools these are, for the log; empty for the only model
        """
        self._pool = f"the pool of {model}" if model else "its pool"
        self._named = {
            service: {one: frozenset([one.text] if one.kind is Kind.ADDRESS else []) for one in names}
            for service, names in ((Service.TARGET, targets), (Service.DRAFT, drafts))
        }
        self._decisions: dict[tuple[Service, str], Decision] = {}
        self._members: dict[tuple[Service, str], Member] = {}
        self.next: Members | None = None
        self.on_join: Joined = lambda _: None
        self.on_leave: Left = lambda *_: None
        for service in Service:
            self._apply(service, drain=False)

    def __iter__(self) -> Iterator[Member]:
        """All members."""
        return iter(self._members.values())

    def of(self, service: Service) -> list[Member]:
        """The members of a pool."""
        return [member for member in self._members.values() if member.service is service]

    def names(self, service: Service) -> list[Named]:
        """What the flags name, in their order."""
        return list(self._named[service])

    def find(self, service: Service, address: str) -> Member | None:
        """The member at an address."""
        return self._members.get((service, address))

    def set_addresses(self, service: Service, named: Named, addresses: Iterable[str]) -> None:
        """A DNS name or a file names exactly these addresses now."""
        before, self._named[service][named] = self._named[service][named], frozenset(addresses)
        for address in before - self._all_named(service):
            decision = self._decisions.get((service, address))
            if decision is not None and decision.hides:
                self._decisions[service, address] = replace(decision, hides=False)
        self._apply(service, drain=True)

    # --- the API ---

    def decide(self, decision: Decision) -> bool:
        """Take a decision of this worker or of another. False if a later one is known."""
        key = decision.service, decision.address
        known = self._decisions.get(key)
        if known is not None and known.stamp >= decision.stamp:
            return False
        hides = not decision.added and (decision.hides or decision.address in self._all_named(decision.service))
        self._decisions[key] = replace(decision, hides=hides)
        self._apply(decision.service, drain=decision.drain)
        if self.next is not None:
            self.next.decide(replace(decision, hides=False))  # what it hides there depends on what names it there
        return True

    def take(self, decision: Decision) -> bool:
        """Take a decision that may be older than these members. False as of `decide`.

        Where a removal hid nothing, only members that the API had added before need it: names that came later stay.
        """
        known = (decision.service, decision.address) in self._decisions
        return (known or decision.added or decision.hides) and self.decide(decision)

    def decision(self, service: Service, address: str) -> Decision | None:
        """What the API last set for a replica; None if it set nothing."""
        return self._decisions.get((service, address))

    @property
    def decisions(self) -> list[Decision]:
        """What the API decided, for a worker that starts later."""
        return list(self._decisions.values())

    # --- the pools that follow ---

    def _apply(self, service: Service, *, drain: bool) -> None:
        """Report the replicas that join and leave. drain: whether those that leave do so gradually."""
        wanted = {member.address: member for member in self._wanted(service)}
        for member in self.of(service):
            if member.address not in wanted:
                del self._members[service, member.address]
                log.info("the %s at %s leaves %s", service, member.address, self._pool)
                self.on_leave(member, drain)
        for member in wanted.values():
            new = (service, member.address) not in self._members
            self._members[service, member.address] = member
            if new:
                named = ", ".join(source for source in member.sources if source != member.address)
                names = f" ({named})" if named else ""
                log.info("the %s at %s joins %s%s", service, member.address, self._pool, names)
                self.on_join(member)

    def _all_named(self, service: Service) -> frozenset[str]:
        """The addresses that flags, DNS names and files name."""
        return frozenset().union(*self._named[service].values())

    def _wanted(self, service: Service) -> list[Member]:
        sources: dict[str, list[tuple[int, Named]]] = {}  # with ranks
        for rank, (named, addresses) in enumerate(self._named[service].items()):
            for address in sorted(addresses):
                sources.setdefault(address, []).append((rank, named))
        decided = {decision.address: decision for decision in self._decisions.values() if decision.service is service}
        added = [decision.address for decision in decided.values() if decision.added]
        for address in added:
            sources.setdefault(address, [])
        return [
            Member(
                service,
                address,
                (*(named.text for _, named in names), *([API] if address in added else [])),
                min((rank for rank, _ in names), default=len(self._named[service])),
                next((named.host for _, named in names if named.kind is Kind.DNS), ""),
                any(named.kind is Kind.ADDRESS for _, named in names),
            )
            for address, names in sources.items()
            if address not in decided or not decided[address].hides
        ]
