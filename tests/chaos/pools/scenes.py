"""What happens to the pools: each scene is a change or a fault under load, until the pools are whole again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import aiohttp

from bench.harness.errors import BenchError
from tests.chaos.pools.system import DRAFTS, REPLICAS, TARGETS, PoolSystem

_RECOVERY_SECONDS = 120.0
_DOWN_SECONDS = 1.0  # between a kill and the start of the process
_SHORT_CUT = 8.0  # of the whole pool: shorter than what counts as a loss
_POLL = 0.05


@dataclass(frozen=True)
class Times:
    """noticed: seconds until the gateway shows the loss, or that the replica has left; None if it did not. whole:
    seconds until all replicas of the pool are in use and have sessions, from `whole_from` on
    """

    begun: float
    noticed: float | None
    whole: float | None


@dataclass(frozen=True)
class Scene:
    """A scene. nodes: those that it is about"""

    name: str
    nodes: tuple[str, ...]
    act: Callable[[PoolSystem, Sequence[str], float], Awaitable[Times]]


async def calm(system: PoolSystem, nodes: Sequence[str], seconds: float) -> Times:
    """Nothing but load."""
    begun = time.monotonic()
    await asyncio.sleep(min(seconds, 4.0))
    return Times(begun, None, None)


async def kill(system: PoolSystem, nodes: Sequence[str], seconds: float) -> Times:
    """The processes die, and start again a second later."""
    begun = time.monotonic()
    for node in nodes:
        system.kill(node)
    noticed = await _noticed(system, nodes, begun, _DOWN_SECONDS)
    await asyncio.sleep(max(0.0, begun + _DOWN_SECONDS - time.monotonic()))
    for node in nodes:
        system.start(node)
    started = time.monotonic()
    return Times(begun, noticed, await _whole(system, nodes, started))


async def drain(system: PoolSystem, nodes: Sequence[str], seconds: float) -> Times:
    """The replicas leave their pool."""
    begun = time.monotonic()
    for node in nodes:
        await system.remove(node)
    await system.wait_until(lambda found: not any(node in found for node in nodes), "a replica drains still")
    return Times(begun, time.monotonic() - begun, None)


async def add(system: PoolSystem, nodes: Sequence[str], seconds: float) -> Times:
    """The replicas join their pool."""
    begun = time.monotonic()
    for node in nodes:
        await system.add(node)
    return Times(begun, None, await _whole(system, nodes, begun))


async def partition(system: PoolSystem, nodes: Sequence[str], seconds: float) -> Times:
    """The hosts are cut off from all others, and connected again."""
    begun = time.monotonic()
    system.cut(nodes)
    noticed = await _noticed(system, nodes, begun, seconds)
    await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))
    system.cut()
    healed = time.monotonic()
    return Times(begun, noticed, await _whole(system, nodes, healed))


async def short_partition(system: PoolSystem, nodes: Sequence[str], seconds: float) -> Times:
    """As `partition`, for a time that no peer counts as a loss."""
    return await partition(system, nodes, min(seconds, _SHORT_CUT))


async def _noticed(system: PoolSystem, nodes: Sequence[str], begun: float, seconds: float) -> float | None:
    """Seconds until the gateway shows that one of the replicas is not in use; None if it does not in some seconds."""
    while time.monotonic() < begun + seconds:
        with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
            found = await system.workers()
            if any(found[node]["state"] != "ready" for node in nodes):
                return time.monotonic() - begun
        await asyncio.sleep(_POLL)
    return None


async def _whole(system: PoolSystem, nodes: Sequence[str], since: float) -> float:
    """Seconds until replicas have sessions again, and draft tokens are accepted. Raises BenchError if they do not."""
    await system.wait_ready(nodes, _RECOVERY_SECONDS, sessions=1)
    before = await system.metric("outrider_accepted_draft_tokens_total")
    end = time.monotonic() + _RECOVERY_SECONDS
    while await system.metric("outrider_accepted_draft_tokens_total") <= before:
        if time.monotonic() > end:
            raise BenchError("no draft token is accepted")
        await asyncio.sleep(_POLL)
    return time.monotonic() - since


def scenes(seed: int, *, few: bool = False) -> list[Scene]:
    """All scenes, in an order in which each leaves what the next needs. few: some of them, for a test.

    seed: which of two replicas a scene is about
    """
    dice = random.Random(seed)

    def one(pool: Sequence[str]) -> tuple[str, ...]:
        return (dice.choice(pool),)

    leaving, leaving_draft = one(TARGETS), one(DRAFTS)
    if few:
        return [
            Scene("killed", one(TARGETS), kill),
            Scene("drained", leaving, drain),
            Scene("added", leaving, add),
            Scene("partitioned", one(REPLICAS), short_partition),
        ]
    return [
        Scene("calm", (), calm),
        Scene("killed", one(TARGETS), kill),
        Scene("killed", one(DRAFTS), kill),
        Scene("killed", DRAFTS, kill),
        Scene("drained", leaving, drain),
        Scene("added", leaving, add),
        Scene("drained", leaving_draft, drain),
        Scene("added", leaving_draft, add),
        Scene("partitioned", one(TARGETS), partition),
        Scene("partitioned", one(DRAFTS), partition),
        Scene("partitioned briefly", TARGETS, short_partition),
        Scene("killed", TARGETS, kill),
    ]
