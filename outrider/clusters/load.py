"""The load of both pools, from what gateways answer: `GET /workers` and `/metrics`.

Every gateway counts its own sessions and steps; what an engine counts itself is the same in all of them. Counters are
compared with those of some seconds before, because the number of replicas follows the recent load.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.clusters.scaling import Load

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MIN_STEPS = 20  # steps of sessions in the window below which its figures are too uncertain

Listing = Sequence[Mapping[str, Any]]  # the `workers` of GET /workers


@dataclass(frozen=True)
class Counters:
    """What has happened since the start of the gateways and targets. late, lag_tokens and proposals: of drafts."""

    steps: float = 0.0
    tokens: float = 0.0
    accepted: float = 0.0  # draft tokens of the draft service
    late: float = 0.0
    lag_tokens: float = 0.0
    proposals: float = 0.0

    def since(self, before: Counters) -> Counters | None:
        """What has happened since an earlier moment; None if a process has restarted in between."""
        names = list(self.__dataclass_fields__)
        change = {name: getattr(self, name) - getattr(before, name) for name in names}
        return None if min(change.values()) < 0 else Counters(**change)


def samples_in(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample of a page of metrics."""
    for line in page.splitlines():
        found = _SAMPLE.match(line)
        if found is not None:
            name, labels, value = found.groups()
            yield name, dict(_LABEL.findall(labels or "")), float(value)


def counters_of(pages: Sequence[str]) -> Counters:
    """The counters of all gateways together."""
    own = {"outrider_verification_steps_total": "steps", "outrider_generated_tokens_total": "tokens"}
    engines = {"outrider_draft_lag_tokens_sum": "lag_tokens", "outrider_draft_lag_tokens_count": "proposals"}
    sums = dict.fromkeys(("steps", "tokens", "accepted"), 0.0)
    by_target: dict[tuple[str, str], float] = {}  # counted by targets, which each gateway reports
    for page in pages:
        for name, labels, value in samples_in(page):
            if name in own:
                sums[own[name]] += value
            elif name == "outrider_accepted_draft_tokens_by_source_total" and labels.get("source") == "draft":
                sums["accepted"] += value
            elif name in engines or (
                name == "outrider_steps_without_draft_by_cause_total" and labels.get("cause") == "late"
            ):
                key = engines.get(name, "late"), labels.get("address", "")
                by_target[key] = max(by_target.get(key, 0.0), value)
    for wanted in ("late", "lag_tokens", "proposals"):
        sums[wanted] = sum(value for (name, _), value in by_target.items() if name == wanted)
    return Counters(**sums)


def pool_load(service: str, listings: Sequence[Listing]) -> Load:
    """Sessions and capacity of a pool's ready replicas. service: "target" or "draft"."""
    sessions: dict[str, int] = {}
    waiting: dict[str, int] = {}
    capacity: dict[str, int] = {}
    for listing in listings:
        for one in listing:
            if one["service"] != service or one["state"] != "ready":
                continue
            address = one["address"]
            sessions[address] = sessions.get(address, 0) + one["sessions"]
            waiting[address] = max(waiting.get(address, 0), one["waiting_sessions"])
            capacity[address] = one["max_sessions"]
    queued = sum(min(count, sessions[address]) for address, count in waiting.items())
    return Load(len(capacity), sum(sessions.values()), queued, sum(capacity.values()))


@dataclass
class Window:
    """The counters of the last seconds. seconds: its length."""

    seconds: float
    _seen: deque[tuple[float, Counters]] = field(default_factory=deque)

    def add(self, now: float, counters: Counters) -> Counters | None:
        """Take the present counters. Returns what happened in the window; None if that is unknown."""
        if self._seen and counters.since(self._seen[-1][1]) is None:
            self._seen.clear()
        self._seen.append((now, counters))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self.seconds:
            self._seen.popleft()
        return counters.since(self._seen[0][1])


def draft_load(load: Load, targets: Load, lately: Counters | None) -> Load:
    """The load of the draft pool with what happened to its proposals lately. targets: the load of the target pool."""
    load = replace(load, demand=targets.sessions)
    if lately is None or lately.steps < _MIN_STEPS:
        return load
    length = lately.tokens / lately.steps
    lag = lately.lag_tokens / lately.proposals / length if lately.proposals and length else None
    return replace(load, late=lately.late / lately.steps, lag_steps=lag, gain=lately.accepted / lately.steps)
