"""What is measured of running gateways under load: a window of steady load, and a change of the pools."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from bench.harness.errors import BenchError
from bench.pools.load import Load
from bench.pools.system import Gateway, Replica, Traffic

WARM_UP = 1.0  # seconds of load before a window, from the first token of all clients on
_FIRST_TIMEOUT = 60.0  # seconds until a replica that was added has its first session
_POLL = 0.01  # seconds
_prompts = itertools.count(0, 1 << 16)  # each load has prompts of its own


@dataclass(frozen=True)
class Window:
    """A window of steady load. tokens: of each session. cpu: processor seconds of all gateways. traffic: theirs

    begin: seconds until all sessions, which begin at once, have a token; before the window
    wait, pause: the longest wait for a first token in the window, and the longest between two pieces, in seconds
    """

    seconds: float
    tokens: Sequence[int]
    cpu: float
    traffic: Traffic
    begin: float
    wait: float
    pause: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / self.seconds

    @property
    def cpu_per_token(self) -> float:
        """Processor seconds of the gateways for a token."""
        return self.cpu / max(1, sum(self.tokens))

    @property
    def fairness(self) -> float:
        """Jain's index over the sessions."""
        return jain(self.tokens)


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all shares are equal, 1/n if one of n has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def new_load(gateways: Sequence[Gateway], sessions: int, tokens: int) -> Load:
    """Clients of all gateways, with prompts that no load had before."""
    return Load([gateway.port for gateway in gateways], sessions, tokens, next(_prompts))


async def window(gateways: Sequence[Gateway], sessions: int, tokens: int, seconds: float) -> Window:
    """Measure a window of steady load. tokens: of an answer."""
    async with new_load(gateways, sessions, tokens).running() as load:
        begin = await load.begun()
        await asyncio.sleep(WARM_UP)
        return await _observe(gateways, load, seconds, begin)


async def _observe(gateways: Sequence[Gateway], load: Load, seconds: float, begin: float) -> Window:
    before = [await _traffic(gateway) for gateway in gateways]
    start, cpu = time.monotonic(), sum(gateway.cpu_seconds() for gateway in gateways)
    await asyncio.sleep(seconds)
    end, cpu = time.monotonic(), sum(gateway.cpu_seconds() for gateway in gateways) - cpu
    after = [await _traffic(gateway) for gateway in gateways]
    # A busy gateway takes its time for an answer, so its counts are of a time of their own.
    grown = [
        later.since(earlier).scaled((end - start) / (then - first))
        for (first, earlier), (then, later) in zip(before, after, strict=True)
    ]
    traffic = reduce(Traffic.plus, grown, Traffic())
    wait, pause = load.wait(start, end), load.pause(start, end)
    return Window(end - start, load.tokens(start, end), cpu, traffic, begin, wait, pause)


async def _traffic(gateway: Gateway) -> tuple[float, Traffic]:
    """The counts of a gateway, and when it answered."""
    found = await gateway.traffic()
    return time.monotonic(), found


@dataclass(frozen=True)
class Change:
    """A change of a pool under load, in seconds.

    done: until the change is complete as the gateway reports it
    first_token: until a client has the first token that came through the replica; None for a loss
    pause: the longest of a stream from the change on, or wait for its first token; usual: before it
    """

    done: float
    first_token: float | None
    pause: float
    usual: float


async def change(
    load: Load, make: Callable[[], Awaitable[float]], settle: float, joins: Replica | None = None
) -> Change:
    """Make a change while a load runs.

    make: returns the time from which the change counts. settle: seconds that are observed before it and after it.
    joins: the replica that is to have sessions afterwards
    """
    calm = time.monotonic()
    await asyncio.sleep(settle)
    called = time.monotonic()
    begun = await make()
    done = time.monotonic() - begun
    first = None if joins is None else max(0.0, await _first_token(load, joins, called) - begun)
    await asyncio.sleep(settle)
    now = time.monotonic()
    pause, usual = (max(load.pause(*span), load.wait(*span)) for span in ((called, now), (calm, called)))
    return Change(done, first, pause, usual)


async def _first_token(load: Load, replica: Replica, since: float) -> float:
    """When a client had the first token of a session on a replica, or the first with the help of its proposals."""
    end = time.monotonic() + _FIRST_TIMEOUT
    while time.monotonic() < end:
        for when, prompt in replica.firsts(since):
            arrival = load.arrival(prompt, when)
            if arrival is not None:
                return arrival
        await asyncio.sleep(_POLL)
    raise BenchError(f"the {replica.role} at {replica.address} had no session in {_FIRST_TIMEOUT:.0f} s")
