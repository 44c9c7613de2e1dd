"""How many replicas a pool should have: a pure function of its rules, its load and how long the load has lasted.

A target pool is loaded by its sessions and by those that wait; a draft pool also by draft tokens that come too late.
Two thresholds and two times keep the number from swinging: a pool grows when its load was above the upper one for some
seconds, and shrinks when the load of the remaining replicas would have been below the lower one for some minutes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.errors import ConfigError

_MIN_GAIN = 0.05  # accepted draft tokens per step below which a draft that is on time is not worth a replica
_MAX_LAG_STEPS = 1.0  # a proposal that is a whole step late is dropped by the target


@dataclass(frozen=True)
class Bounds:
    """The smallest and largest number of replicas."""

    low: int
    high: int

    @classmethod
    def parse(cls, flag: str, text: str, least: int) -> Bounds:
        """The bounds in a flag, "2" or "1:4". least: the smallest number that makes sense. Raises ConfigError."""
        first, colon, last = text.partition(":")
        if not (first.isascii() and first.isdigit() and (not colon or (last.isascii() and last.isdigit()))):
            raise ConfigError(f"{flag} {text} is no number of replicas; write 2, or 1:4 for 1 to 4 by load")
        low, high = int(first), int(last or first)
        if low < least or high < low:
            raise ConfigError(f"{flag} {text}: write MIN:MAX with {least} <= MIN <= MAX")
        return cls(low, high)

    def clip(self, count: int) -> int:
        """The nearest number within the bounds."""
        return min(max(count, self.low), self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class Rules:
    """When a pool grows and shrinks. up_load, down_load: sessions over the sessions that the replicas can run.

    up_seconds, down_seconds: time for which the condition must hold. late: fraction of steps whose draft tokens come
    late, above which drafts are added
    """

    bounds: Bounds
    up_load: float = 0.8
    down_load: float = 0.5
    up_seconds: float = 15.0
    down_seconds: float = 300.0
    late: float = 0.2


@dataclass(frozen=True)
class Load:
    """The load of a pool. Figures of a pool's proposals are None where none are known.

    ready: replicas in use. sessions: on them, waiting ones included. waiting: those that wait for admission
    capacity: sessions that the replicas can run. demand: sessions that could use the pool, also while it is empty
    late: fraction of decoding steps whose draft tokens came late. lag_steps: mean delay of a proposal, in steps
    gain: accepted draft tokens of the draft service per step, its part of the accept length
    """

    ready: int
    sessions: int = 0
    waiting: int = 0
    capacity: int = 0
    demand: int = 0
    late: float | None = None
    lag_steps: float | None = None
    gain: float | None = None

    @property
    def behind(self) -> float:
        """Fraction of steps that found no draft token in time; 0 if unknown."""
        return self.late or 0.0


@dataclass(frozen=True)
class Trend:
    """Since when the pool should grow or shrink, by the caller's clock; None if it should not."""

    grow_since: float | None = None
    shrink_since: float | None = None


def decide(rules: Rules, count: int, load: Load, trend: Trend, now: float) -> tuple[int, Trend]:
    """The number of replicas that a pool should have now, and the trend for the next call. count: that it has."""
    within = rules.bounds.clip(count)
    if within != count:
        return within, Trend()
    larger, smaller = _larger(rules, count, load), _smaller(rules, count, load)
    grow_since = _since(trend.grow_since, now, larger > count)
    shrink_since = _since(trend.shrink_since, now, smaller < count)
    if grow_since is not None and now - grow_since >= rules.up_seconds:
        return larger, Trend()
    if shrink_since is not None and now - shrink_since >= rules.down_seconds:
        return smaller, Trend()
    return count, Trend(grow_since, shrink_since)


def _since(before: float | None, now: float, holds: bool) -> float | None:
    return None if not holds else now if before is None else before


def _larger(rules: Rules, count: int, load: Load) -> int:
    """The number of replicas that the load needs; `count` if they suffice, or while some of them are still starting."""
    if count == 0:
        return rules.bounds.clip(1 if load.demand else 0)
    if load.ready < count or _useless(rules, load):
        return count
    wanted = count
    if load.capacity:
        wanted = max(wanted, math.ceil(load.ready * load.sessions / (load.capacity * rules.up_load)))
    late = load.behind > rules.late or (load.lag_steps or 0.0) > _MAX_LAG_STEPS
    if load.waiting or late:
        wanted = max(wanted, count + 1)
    return rules.bounds.clip(wanted)


def _smaller(rules: Rules, count: int, load: Load) -> int:
    """One replica fewer if the others would have little load; `count` otherwise."""
    fewer = rules.bounds.clip(count - 1)
    if fewer == count or load.waiting:
        return count
    if _useless(rules, load) or not (load.sessions or load.demand):
        return fewer
    if fewer == 0 or not load.ready or load.behind > rules.late / 2:
        return count
    capacity = load.capacity / load.ready * fewer
    return fewer if load.sessions < rules.down_load * capacity else count


def _useless(rules: Rules, load: Load) -> bool:
    """True for drafts that are on time and whose tokens are not accepted: more of them would not help."""
    return load.gain is not None and load.gain < _MIN_GAIN and load.behind <= rules.late
