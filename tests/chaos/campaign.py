"""One cell after the other: load, fault, recovery, and whether texts and levels are what they were."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import aiohttp

from bench.harness.errors import BenchError
from tests.chaos.cells import TOKENS, Cell
from tests.chaos.clients import Readers, Request, Stream, follow
from tests.chaos.faults import FAULTS, Fault, Scene
from tests.chaos.system import Levels, System
from tests.support.gateway.services import metric_of

_BEGIN_AT = 0.25  # share of all tokens that have arrived when the fault begins
_STREAM_SECONDS = 300.0  # for all streams of a cell, and for the system to be whole again
_SETTLE_SECONDS = 45.0  # for sessions, pages and files to return
_MORE_FILES = 6  # connections that come and go
_MORE_MEMORY = (1.2, 48.0)  # a factor, and MB: allocators keep what 64 sessions needed


@dataclass
class Result:
    """What a cell showed. whole: seconds from the fault's end, or from a kill, until the system is whole again: all
    processes run and are connected, and a further request had its text, with accepted draft tokens. faults: everything
    that is not as it should be
    """

    cell: Cell
    equal: int = 0
    repeated: int = 0
    undisturbed: float = 0.0
    pause: float = 0.0
    whole: float = 0.0
    seconds: float = 0.0
    levels: Levels | None = None
    faults: list[str] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        """A row of the table."""
        cell = self.cell
        return {
            **cell.columns, "equal texts": f"{self.equal} of {cell.sessions}", "asked again": self.repeated,
            "longest pause, s": self.pause, "whole again, s": self.whole,
            "levels": "returned" if not self.faults else "; ".join(self.faults),
        }  # fmt: skip


class Campaign:
    """Runs cells against one system. seconds: length of stops and cuts."""

    def __init__(self, system: System, seconds: float, note: Callable[[str], None]) -> None:
        self._system, self._seconds, self._note = system, seconds, note
        self._texts: dict[tuple[float, int], list[int]] = {}
        self._level: Levels | None = None

    async def prepare(self, cells: Sequence[Cell]) -> None:
        """Get the undisturbed texts, decoded plainly, of the loads of some cells."""
        sessions, most = max(cell.sessions for cell in cells), max(TOKENS[cell.sessions] for cell in cells)
        for temperature in sorted({0.0, *(cell.temperature for cell in cells)}):
            self._note(f"undisturbed texts at T={temperature:g}")
            requests = [Request(index, temperature, most, draft=False) for index in range(sessions)]
            for stream in await self._streams(requests):
                if stream.error:
                    raise BenchError(f"an undisturbed request failed: {stream.error}")
                self._texts[temperature, stream.request.index] = stream.tokens

    async def run(self, cell: Cell) -> Result:
        """Run a cell. Raises BenchError if the system does not become whole again: later cells would fail, too."""
        self._note(cell.name)
        result, fault, started = Result(cell), FAULTS[cell.fault], time.monotonic()
        lines = len(self._system.output)
        await self._disturbed(result, fault)
        await self._levels(result)
        tracebacks = sum("Traceback" in line for line in self._system.output[lines:])
        if tracebacks:
            result.faults.append(f"{tracebacks} tracebacks in the log")
        result.seconds = time.monotonic() - started
        return result

    async def _disturbed(self, result: Result, fault: Fault) -> None:
        cell, readers = result.cell, Readers()
        slow = fault.name == "slow reader" and cell.role == "gateway"
        requests = [
            Request(index, cell.temperature, TOKENS[cell.sessions], slow=slow and index % 2 == 0)
            for index in range(cell.sessions)
        ]
        streams = [Stream(request) for request in requests]
        tasks = [asyncio.create_task(follow(self._system.url, stream, readers)) for stream in streams]
        await self._begun(streams, tasks)
        scene = Scene(self._system, cell.role, -1, readers, self._seconds)
        if cell.role != "-":
            scene.victim = await self._system.victim(cell.role)
        begun = time.monotonic()
        try:
            await fault.begin(scene)
        except (BenchError, OSError) as error:
            result.faults.append(f"the fault could not be caused: {error}")
        watched = asyncio.gather(*tasks)
        with _limit(result, "the streams did not end"):
            if fault.hold is None:
                await asyncio.wait_for(asyncio.shield(watched), _STREAM_SECONDS)
            else:
                await asyncio.sleep(self._seconds if fault.hold == "long" else float(fault.hold))
        await fault.end(scene)
        ended = begun if fault.kills else time.monotonic()
        await self._system.wait_healthy(_STREAM_SECONDS, scene.victim if fault.kills else None)
        await self._speculates(result)
        result.whole = time.monotonic() - ended
        with _limit(result, "the streams did not end"):
            await asyncio.wait_for(watched, _STREAM_SECONDS)
        fast = [stream for stream in streams if not stream.request.slow]
        result.pause = max((stream.pause(begun) for stream in fast), default=0.0)
        await self._compare(result, fault, streams)

    async def _begun(self, streams: list[Stream], tasks: list[asyncio.Task[None]]) -> None:
        wanted = _BEGIN_AT * sum(stream.request.tokens for stream in streams)
        while sum(len(stream.tokens) for stream in streams) < wanted and not all(task.done() for task in tasks):
            await asyncio.sleep(0.005)
        if all(task.done() for task in tasks):
            raise BenchError(f"the streams ended before the fault began: {streams[0].error or 'they were too fast'}")

    async def _compare(self, result: Result, fault: Fault, streams: list[Stream]) -> None:
        """Count equal texts. Streams that ended with a gateway worker are asked for again, as clients do."""
        broken = [stream for stream in streams if stream.error]
        for stream in broken:
            if not self._right(stream):
                result.faults.append(f"stream {stream.request.index} was wrong before it broke")
        may_break = result.cell.role == "gateway" and fault.kills
        if broken and not may_break:
            result.faults.append(f"{len(broken)} streams broke: {broken[0].error}")
        result.repeated = len(broken)
        again = await self._streams([stream.request for stream in broken])
        for stream in (*(stream for stream in streams if not stream.error), *again):
            whole = len(stream.tokens) == stream.request.tokens
            if self._right(stream) and whole:
                result.equal += 1
            else:
                result.faults.append(self._difference(stream))

    def _right(self, stream: Stream) -> bool:
        text = self._texts[stream.request.temperature, stream.request.index]
        return stream.tokens == text[: len(stream.tokens)]

    def _difference(self, stream: Stream) -> str:
        text, index = self._texts[stream.request.temperature, stream.request.index], stream.request.index
        pairs = enumerate(zip(stream.tokens, text, strict=False))
        first = next((place for place, (one, other) in pairs if one != other), None)
        if first is None:
            return f"stream {index} has {len(stream.tokens)} of {stream.request.tokens} tokens: {stream.error}"
        return f"stream {index} differs at token {first}: {stream.tokens[first]} instead of {text[first]}"

    async def _streams(self, requests: list[Request]) -> list[Stream]:
        streams = [Stream(request) for request in requests]
        await asyncio.gather(*(follow(self._system.url, stream, Readers()) for stream in streams))
        return streams

    async def _speculates(self, result: Result) -> None:
        """The draft's tokens are accepted again."""
        end = time.monotonic() + _SETTLE_SECONDS
        before = await self._accepted()
        while time.monotonic() < end:
            for stream in await self._streams([Request(0, 0.0, 60)]):
                if stream.error or not self._right(stream):
                    result.faults.append(f"afterwards, {self._difference(stream)}")
                    return
            if await self._accepted() > before:
                return
        result.faults.append("no draft token was accepted afterwards")

    async def _accepted(self) -> float:
        return float(metric_of(await self._system.metrics(), "outrider_accepted_draft_tokens_total"))

    async def _levels(self, result: Result) -> None:
        """Wait until all levels have returned; name those that do not."""
        end, off = time.monotonic() + _SETTLE_SECONDS, ["they could not be read"]
        while off and time.monotonic() < end:
            with contextlib.suppress(OSError, aiohttp.ClientError):
                result.levels = await self._system.levels()
                off = self._above(result.levels)
            if off:
                await asyncio.sleep(0.5)
        if result.cell.fault == "none" and self._at_rest(result.levels):
            # The level is what the undisturbed loads have needed.
            self._level = result.levels if self._level is None else _highest(self._level, result.levels)
            return
        result.faults += off

    def _at_rest(self, levels: Levels | None) -> bool:
        return levels is not None and not any((*levels.pages.values(), *levels.sessions.values()))

    def _above(self, levels: Levels) -> list[str]:
        off = [f"{count:g} pages of the {role} are leased" for role, count in levels.pages.items() if count]
        off += [f"{count:g} sessions of the {role} are open" for role, count in levels.sessions.items() if count]
        if self._level is None:
            return off
        for role, count in levels.files.items():
            if count > self._level.files[role] + _MORE_FILES:
                off.append(f"{count} files of the {role} are open, {self._level.files[role]} before")
        factor, more = _MORE_MEMORY
        for role, size in levels.memory.items():
            if size > self._level.memory[role] * factor + more:
                off.append(f"the {role} has {size:.0f} MB, {self._level.memory[role]:.0f} before")
        return off


def _highest(one: Levels, other: Levels) -> Levels:
    first, second = asdict(one), asdict(other)
    return Levels(
        **{name: {role: max(first[name][role], second[name][role]) for role in first[name]} for name in first}
    )


@contextlib.contextmanager
def _limit(result: Result, what: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        result.faults.append(f"{what} in {_STREAM_SECONDS:.0f} s")
