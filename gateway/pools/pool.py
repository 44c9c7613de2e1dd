"""The replicas of one service, and which of them gets a session: the one that has most of its text, unless it is busy.

nobody else               that one
knows enough of the text  the one that knows most of it ...
... but has far more sessions than the least loaded, or no place while that one has: the least loaded
else                      the least loaded; of equals the one that knows most, then the one that has seen least
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from gateway.sessions.prefixes import MOST_PAGES, PAGE_SIZE, Prefixes
from gateway.sessions.session import Session
from gateway.streams.link import Link
from outrider.errors import ConfigError

Replica = TypeVar("Replica", bound=Link[Any, Any])


class Why(StrEnum):
    """What decided, where there was a choice. The values are those of a metric's label."""

    PREFIX = "prefix"
    LOAD = "load"
    BUSY = "busy"  # another one knows more of the text, but has too much to do


@dataclass(frozen=True)
class Routing:
    """When prefixes count. The names and their meaning are those of SGLang's router. Raises ConfigError.

    cache_threshold: part of a text that must be known; 1 goes by load alone
    balance_abs_threshold, balance_rel_threshold: a replica is busy if it has more sessions than the least loaded by
        this number, and by this factor
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 8
    balance_rel_threshold: float = 1.5

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ConfigError(f"--cache-threshold is a part, from 0 to 1, not {self.cache_threshold:g}")
        if self.balance_abs_threshold < 0:
            raise ConfigError(f"--balance-abs-threshold must be 0 or more, not {self.balance_abs_threshold}")
        if not self.balance_rel_threshold >= 1:
            raise ConfigError(f"--balance-rel-threshold must be 1 or more, not {self.balance_rel_threshold:g}")


class _Offer(NamedTuple, Generic[Replica]):
    """A replica as a session sees it. load: its sessions, as if it had as many places as the largest has."""

    full: bool
    load: float
    unknown: int  # tokens of the text that it has not
    seen: int  # pages
    order: int
    replica: Replica


class Pool(Generic[Replica]):
    """Replicas that may come and go. Lives in one event loop."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._prefixes: dict[Replica, Prefixes] = {}
        self.replicas: list[Replica] = []

    def add(self, replica: Replica) -> None:
        """Take a replica on."""
        self.replicas.append(replica)
        self._prefixes[replica] = Prefixes()

    def forget(self, replica: Replica) -> None:
        """A replica was lost; if it comes back, it has nothing."""
        self._prefixes[replica].forget()

    def choose(self, session: Session, candidates: Sequence[Replica]) -> tuple[Replica | None, Why | None]:
        """The replica for a session, and why; None if there is no candidate. candidates: those that could have it."""
        if len(candidates) <= 1:
            return (candidates[0] if candidates else None), None
        offers = self._offers(session, candidates)
        idle = min(offers)
        knower = min(offers, key=lambda offer: (offer.unknown, offer))
        length, rules = len(session.tokens), self._routing
        if length - knower.unknown <= rules.cache_threshold * length:
            return idle.replica, Why.LOAD
        limit = max(idle.load + rules.balance_abs_threshold, idle.load * rules.balance_rel_threshold)
        if knower.load > limit or knower.full > idle.full:
            return idle.replica, Why.BUSY
        return knower.replica, Why.PREFIX

    def learn(self, session: Session, replica: Replica) -> None:
        """A replica has, or is about to get, a session's tokens."""
        if len(self.replicas) > 1:
            most = min(MOST_PAGES, (replica.load.total_pages if replica.load is not None else 0) or MOST_PAGES)
            self._prefixes[replica].remember(self._names(session, replica), most)

    def _offers(self, session: Session, candidates: Sequence[Replica]) -> list[_Offer[Replica]]:
        places = [replica.places for replica in candidates]
        largest = max(places)
        offers = []
        for order, (replica, own) in enumerate(zip(candidates, places, strict=True)):
            prefixes, count = self._prefixes[replica], replica.session_count
            known = prefixes.reach(self._names(session, replica)) * _page_size(replica)
            offers.append(
                _Offer(
                    0 < own <= count,
                    count * largest / own if own else float(count),
                    len(session.tokens) - known,
                    len(prefixes),
                    order,
                    replica,
                )
            )
        return offers

    def _names(self, session: Session, replica: Replica) -> list[int]:
        return session.trail.names(session.tokens, _page_size(replica))


def _page_size(replica: Link[Any, Any]) -> int:
    return getattr(replica.info, "page_size", 0) or PAGE_SIZE
