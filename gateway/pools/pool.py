"""The replicas of one service, and the choice between them: the one with the longest cached prefix, unless it is busy.

Replicas of one pool may differ: the load of a replica is its number of sessions, weighted by its free slots and by how
long its steps take, so that each gets sessions in proportion to what it does.

one candidate                       that one
a cached prefix above the threshold the replica with the longest one ...
... but it is busy, or full         the least loaded replica
otherwise                           the least loaded; among equals the longest prefix, then the fewest cached pages

A replica that the caller prefers counts as least loaded while its load is nearly the least.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from gateway.sessions.prefixes import DEFAULT_PAGE_SIZE, MAX_PAGES, CachedPrefixes
from gateway.sessions.session import Session
from gateway.streams.link import Link
from outrider.errors import ConfigError

Replica = TypeVar("Replica", bound=Link[Any, Any])

_NEAR = 1.1  # times the least load, up to which a preferred replica counts as the least loaded one
_LEVEL = math.log(1.25)  # of step times: within a factor of 1.25 replicas count as equally fast, and prefixes decide


class RoutingReason(StrEnum):
    """The rule that decided between several replicas. The values are label values of a metric."""

    PREFIX = "prefix"
    LOAD = "load"
    BUSY = "busy"  # another replica has a longer cached prefix, but too much to do


@dataclass(frozen=True)
class Routing:
    """When cached prefixes decide. Names and meaning are those of SGLang's router. Raises ConfigError.

    cache_threshold: fraction of a text that must be cached; 1 routes by load alone
    balance_abs_threshold, balance_rel_threshold: a replica is busy if it has more sessions than the least loaded one
        by this number and by this factor
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 8
    balance_rel_threshold: float = 1.5

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ConfigError(f"--cache-threshold must lie in [0, 1], not {self.cache_threshold:g}")
        if self.balance_abs_threshold < 0:
            raise ConfigError(f"--balance-abs-threshold must be 0 or more, not {self.balance_abs_threshold}")
        if not self.balance_rel_threshold >= 1:
            raise ConfigError(f"--balance-rel-threshold must be 1 or more, not {self.balance_rel_threshold:g}")


class _Candidate(NamedTuple, Generic[Replica]):
    """A replica as a session may use it; the smallest is the least loaded.

    load: its sessions, scaled as if it ran as many together as the largest candidate, as fast as the fastest one
    next_load: the same with one session more, so that of idle replicas the fastest one is chosen
    """

    full: bool
    next_load: float
    load: float
    uncached: int  # tokens of the text that are not in its prefix cache
    cached_pages: int
    order: int
    replica: Replica


class Pool(Generic[Replica]):
    """Replicas that may come and go. Lives in one event loop."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._prefixes: dict[Replica, CachedPrefixes] = {}
        self.replicas: list[Replica] = []

    def add(self, replica: Replica) -> None:
        """Add a replica, behind those of its rank and of lower ones."""
        insort(self.replicas, replica, key=lambda one: one.rank)
        self._prefixes[replica] = CachedPrefixes()

    def remove(self, replica: Replica) -> None:
        """Remove a replica."""
        self.replicas.remove(replica)
        del self._prefixes[replica]

    def clear_prefixes(self, replica: Replica) -> None:
        """A replica was lost; if it comes back, its cache is empty."""
        self._prefixes[replica].clear()

    def choose(
        self, session: Session, replicas: Sequence[Replica], preferred: Collection[Replica] = ()
    ) -> tuple[Replica | None, RoutingReason | None]:
        """The replica for a session, and the reason; None if there is none. replicas: those that can run it."""
        if len(replicas) <= 1:
            return (replicas[0] if replicas else None), None
        candidates = self._candidates(session, replicas)
        idle = min(candidates)
        near = [one for one in candidates if one.replica in preferred and one.full == idle.full]
        idle = min((one for one in near if one.load <= _NEAR * idle.load), default=idle)
        cached = min(candidates, key=lambda candidate: (candidate.uncached, candidate))
        length, rules = len(session.tokens), self._routing
        if length - cached.uncached <= rules.cache_threshold * length:
            return idle.replica, RoutingReason.LOAD
        limit = max(idle.load + rules.balance_abs_threshold, idle.load * rules.balance_rel_threshold)
        if cached.load > limit or cached.full > idle.full:
            return idle.replica, RoutingReason.BUSY
        return cached.replica, RoutingReason.PREFIX

    def add_prefix(self, session: Session, replica: Replica) -> None:
        """A replica has, or is about to compute, a session's tokens."""
        if len(self.replicas) > 1:
            report = replica.load.report
            capacity = min(MAX_PAGES, (report.total_pages if report is not None else 0) or MAX_PAGES)
            self._prefixes[replica].add(self._hashes(session, replica), capacity)

    def _candidates(self, session: Session, replicas: Sequence[Replica]) -> list[_Candidate[Replica]]:
        limits = [replica.max_sessions for replica in replicas]
        largest = max(limits)
        candidates = []
        for order, (replica, limit, slowness) in enumerate(zip(replicas, limits, _slowness(replicas), strict=True)):
            prefixes, count = self._prefixes[replica], replica.load.session_count
            load = count * largest / limit if limit else float(count)
            cached = prefixes.match(self._hashes(session, replica)) * _page_size(replica)
            candidates.append(
                _Candidate(
                    0 < limit <= count,
                    (load + 1) * slowness,
                    load * slowness,
                    len(session.tokens) - cached,
                    len(prefixes),
                    order,
                    replica,
                )
            )
        return candidates

    def _hashes(self, session: Session, replica: Replica) -> list[int]:
        return session.prefix_hashes.of(session.tokens, _page_size(replica))


def _slowness(replicas: Sequence[Link[Any, Any]]) -> list[float]:
    """How much longer the steps of each replica take than those of the fastest one; 1 where that is unknown."""
    known = [replica.load.step_time.seconds for replica in replicas if replica.load.step_time.seconds]
    fastest = min(known, default=0.0)
    found = []
    for replica in replicas:
        seconds = replica.load.step_time.seconds
        levels = round(math.log(seconds / fastest) * replica.load.step_time.weight / _LEVEL) if seconds else 0
        found.append(math.exp(levels * _LEVEL))
    return found


def _page_size(replica: Link[Any, Any]) -> int:
    return getattr(replica.info, "page_size", 0) or DEFAULT_PAGE_SIZE
