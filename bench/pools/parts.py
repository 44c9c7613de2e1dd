"""The parts of the benchmark. Each yields rows of a table."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.pools.measures import WARM_UP, Change, Window, change, jain, new_load, window
from bench.pools.system import Gateway, Replica, gateways, replicas

Row = dict[str, Any]
SPEEDS = (1.0, 2.0, 4.0)  # steps of unequal targets, over the shortest
_SHARE_WARM_UP = 4.0  # seconds until a gateway has measured how long steps take
_SAMPLES = 0.1  # seconds between two looks at where the sessions are


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    points: targets, drafts and sessions of the windows of one gateway. limited, loads: targets and drafts, and
    sessions, with which a limited gateway is measured. counts: numbers of limited gateways, at the most of these
    sessions. changing: sessions during changes. sharing: sessions on unequal targets. step, draft_step: of the engines,
    in ms. tokens: of an answer. row_bytes: of hidden states, a token. settle: seconds around a change
    """

    points: Sequence[tuple[int, int, int]] = (
        (1, 1, 1), (1, 1, 8), (1, 1, 64), (1, 8, 64), (2, 1, 64), (2, 2, 64), (4, 4, 256), (8, 1, 256), (8, 8, 256),
        (8, 8, 512),
    )  # fmt: skip
    limited: tuple[int, int] = (4, 4)
    loads: Sequence[int] = (32, 64, 128, 256)
    counts: Sequence[int] = (2, 3)
    changing: int = 32
    sharing: int = 56
    step: float = 50.0
    draft_step: float = 10.0
    accept_length: int = 4
    tokens: int = 128
    row_bytes: int = 8192
    seconds: float = 3.0
    settle: float = 0.7
    rounds: int = 3

    @property
    def most(self) -> tuple[int, int]:
        """Targets and drafts of the largest pools."""
        return max(point[0] for point in self.points), max(point[1] for point in self.points)

    @contextlib.contextmanager
    def pools(self, targets: int, drafts: int, row_bytes: int = 0) -> Iterator[list[Replica]]:
        """Equal simulated services, targets first."""
        steps = [("target", self.step)] * targets + [("draft", self.draft_step)] * drafts
        with (
            tempfile.TemporaryDirectory() as folder,
            replicas(Path(folder), steps, self.accept_length, row_bytes) as made,
        ):
            yield made


def first_of(members: Sequence[Replica], targets: int, drafts: int) -> list[Replica]:
    """The first replicas of both services."""
    chosen = {"target": targets, "draft": drafts}
    return [one for role in chosen for one in [one for one in members if one.role == role][: chosen[role]]]


def throughput(sizes: Sizes, members: Sequence[Replica]) -> Iterator[Row]:
    """One gateway, by targets, drafts and sessions."""
    for targets, drafts in dict.fromkeys(point[:2] for point in sizes.points):
        with gateways(first_of(members, targets, drafts)) as running:
            for sessions in (point[2] for point in sizes.points if point[:2] == (targets, drafts)):
                seen = uvloop.run(window(running, sessions, sizes.tokens, sizes.seconds))
                yield {
                    "targets": targets, "drafts": drafts, "sessions": sessions,
                    **_of_window(seen, sessions, sizes), **_raw(seen), "step, ms": sizes.step,
                    "draft's step, ms": sizes.draft_step,
                }  # fmt: skip


def features(sizes: Sizes, sessions: int = 32) -> Iterator[Row]:
    """One gateway that relays hidden states."""
    with sizes.pools(1, 1, sizes.row_bytes) as members, gateways(members) as running:
        seen = uvloop.run(window(running, sessions, sizes.tokens, sizes.seconds))
        yield {"targets": 1, "drafts": 1, "sessions": sessions, **_of_window(seen, sessions, sizes), **_raw(seen)}


def saturation(sizes: Sizes, members: Sequence[Replica], cores: float) -> Iterator[Row]:
    """Gateways that have a share of a core each; 0 for no limit. The last row is one gateway with two processes."""
    systems = [(1, 1, sizes.loads), *((count, 1, sizes.loads[-1:]) for count in sizes.counts), (1, 2, sizes.loads[-1:])]
    for count, workers, loads in systems:
        pools = first_of(members, *sizes.limited)
        with gateways(pools, count, workers=workers, cores=workers * cores) as running:
            for sessions in loads:
                seen = uvloop.run(window(running, sessions, sizes.tokens, sizes.seconds))
                row = {"gateways": count, "processes each": workers, "sessions": sessions}
                row |= _of_window(seen, sessions, sizes)
                used = seen.cpu / seen.seconds / count / workers
                yield {**row, "busy": f"{used / cores:.0%}" if cores else f"{used:.2f} cores"}


def _of_window(seen: Window, sessions: int, sizes: Sizes) -> Row:
    """The columns of a window. engines: its tokens/s over those of engines that never wait for anything."""
    ideal = sessions * sizes.accept_length / (sizes.step / 1e3)
    return {
        "tokens/s": seen.rate, "engines": f"{seen.rate / ideal:.0%}",
        "accept length": sum(seen.tokens) / max(1.0, seen.traffic.commits),
        "gateway cores": seen.cpu / seen.seconds, "gateway µs/token": 1e6 * seen.cpu_per_token,
        "begin, ms": 1e3 * seen.begin, "first token, ms": 1e3 * seen.wait, "longest pause, ms": 1e3 * seen.pause,
        "Jain": round(seen.fairness, 4),
    }  # fmt: skip


def _raw(seen: Window) -> Row:
    """What the reckoning needs."""
    of_features = seen.traffic.bytes_of("features", "received")
    return {
        "frames/s": sum(count for (stream, _), count in seen.traffic.frames.items() if stream != "features")
        / seen.seconds,
        "commits/s": seen.traffic.commits / seen.seconds,
        "commit bytes/s": (seen.traffic.bytes_of("target", "received") - of_features) / seen.seconds,
        "proposal bytes/s": seen.traffic.bytes_of("draft", "received") / seen.seconds,
        "feature bytes/s": of_features / seen.seconds,
    }


def shares(sizes: Sizes) -> Iterator[Row]:
    """Targets of unequal speed: the sessions that each has."""
    steps = [("target", factor * sizes.step / SPEEDS[1]) for factor in SPEEDS] + [("draft", sizes.draft_step)]
    with (
        tempfile.TemporaryDirectory() as folder,
        replicas(Path(folder), steps, sizes.accept_length) as members,
        gateways(members) as running,
    ):
        yield from uvloop.run(_shares(sizes, members, running))


async def _shares(sizes: Sizes, members: Sequence[Replica], running: Sequence[Gateway]) -> list[Row]:
    targets = [one for one in members if one.role == "target"]
    sums = dict.fromkeys((one.address for one in targets), 0.0)
    async with new_load(running, sizes.sharing, sizes.tokens // 2).running():
        await asyncio.sleep(min(_SHARE_WARM_UP, 2 * sizes.seconds))
        end = time.monotonic() + sizes.seconds
        while time.monotonic() < end:
            for worker in await running[0].workers():
                if worker["address"] in sums:
                    sums[worker["address"]] += worker["sessions"]
            await asyncio.sleep(_SAMPLES)
    speeds = [1e3 / float(one.arguments[0]) for one in targets]
    held = [sums[one.address] / max(1.0, sum(sums.values())) for one in targets]
    index = jain([share / speed for share, speed in zip(held, speeds, strict=True)])
    return [
        {
            "step, ms": float(one.arguments[0]), "steps/s": speed, "share of the steps/s": speed / sum(speeds),
            "share of the sessions": share, "Jain of sessions over steps/s": round(index, 4),
        }
        for one, speed, share in zip(targets, speeds, held, strict=True)
    ]  # fmt: skip


def changes(sizes: Sizes, members: Sequence[Replica]) -> Iterator[Row]:
    """Replicas that join, leave and are killed under load, in pools of two."""
    pair = first_of(members, 2, 2)
    with gateways(pair) as running:
        seen = uvloop.run(_changes(sizes, running[0], pair))
    for name, found in seen.items():
        firsts = [one.first_token for one in found if one.first_token is not None]
        pauses, usual = [1e3 * one.pause for one in found], max(1e3 * one.usual for one in found)
        reported = not name.endswith("killed")
        yield {
            "change": name,
            "reported after, ms": 1e3 * statistics.median(one.done for one in found) if reported else "",
            "first token after, ms": 1e3 * statistics.median(firsts) if firsts else "",
            "at most, ms": 1e3 * max(firsts) if firsts else "",
            "longest pause, ms": statistics.median(pauses), "pause at most, ms": max(pauses),
            "pause before it, ms": usual,
        }  # fmt: skip


async def _changes(sizes: Sizes, gateway: Gateway, pair: Sequence[Replica]) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    async with new_load([gateway], sizes.changing, sizes.tokens // 2).running() as load:
        await asyncio.sleep(WARM_UP)
        for number in range(sizes.rounds):
            for role in ("target", "draft"):
                replica = [one for one in pair if one.role == role][number % 2]
                for name, make, joins in _steps_of(gateway, replica):
                    seen = await change(load, make, sizes.settle, replica if joins else None)
                    found.setdefault(f"{role} {name}", []).append(seen)
    return found


def _steps_of(gateway: Gateway, replica: Replica) -> list[tuple[str, Callable[[], Awaitable[float]], bool]]:
    async def drain() -> float:
        begun = time.monotonic()
        await gateway.remove(replica)
        await gateway.wait_state(replica, None)
        return begun

    async def add() -> float:
        begun = time.monotonic()
        await gateway.add(replica)
        await gateway.wait_state(replica, "ready")
        return begun

    async def kill() -> float:
        begun = time.monotonic()
        replica.kill()
        return begun

    async def restart() -> float:
        replica.start()
        await replica.wait_serving()
        begun = time.monotonic()
        await gateway.wait_state(replica, "ready")
        return begun

    return [("drained", drain, False), ("added", add, True), ("killed", kill, False), ("serves again", restart, True)]
