"""Scene after scene under load, and whether each text is the undisturbed one and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.harness.errors import BenchError
from tests.chaos.clients import Readers, Request, Stream, follow
from tests.chaos.pools.scenes import Scene
from tests.chaos.pools.system import PoolSystem

_TEMPERATURES = (0.0, 0.8)
_PROMPT_TOKENS = 6
_BEFORE_SECONDS = 1.0  # of load, from when all streams have begun
_SETTLE_SECONDS = 60.0  # for sessions and pages to return
_STREAM_SECONDS = 180.0  # for all answers to end


class TokenRequest(Request):
    """A request whose prompt has token ids, which every model takes."""

    def body(self) -> dict[str, Any]:
        """As the gateway takes it."""
        prompt = [4 + (31 * self.index + 7 * place) % 200 for place in range(_PROMPT_TOKENS)]
        return super().body() | {"prompt": prompt}


@dataclass
class Result:
    """What a scene showed. Times in seconds; faults: everything that is not as it should be."""

    scene: Scene
    sessions: int
    answers: int = 0
    equal: int = 0
    pause: float = 0.0
    noticed: float | None = None
    whole: float | None = None
    moved: float = 0.0
    faults: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """A row of the table."""
        return {
            "hosts": ", ".join(self.scene.nodes) or "-", "what": self.scene.name, "sessions": self.sessions,
            "equal texts": f"{self.equal} of {self.answers}", "sessions moved": round(self.moved),
            "longest pause, s": self.pause, "noticed after, s": "" if self.noticed is None else self.noticed,
            "whole again, s": "" if self.whole is None else self.whole,
            "left behind": "nothing" if not self.faults else "; ".join(self.faults),
        }  # fmt: skip


class Campaign:
    """Runs scenes against one system. sessions: at a time. tokens: of an answer. seconds: of a partition."""

    def __init__(self, system: PoolSystem, sessions: int, tokens: int, seconds: float) -> None:
        self._system, self._sessions, self._tokens, self._seconds = system, sessions, tokens, seconds
        self._texts: list[list[int]] = []
        self._streams: list[Stream] = []
        self._asked: list[float] = []  # when each stream began
        self._ending = False

    async def prepare(self) -> None:
        """Get the undisturbed texts, which are decoded plainly. Raises BenchError."""
        streams = [Stream(self._request(index, draft=False)) for index in range(2 * self._sessions)]
        await asyncio.gather(*(follow(self._system.url, stream, Readers()) for stream in streams))
        for stream in streams:
            if stream.error or len(stream.tokens) != self._tokens:
                raise BenchError(f"an undisturbed request failed: {stream.error}, {len(stream.tokens)} tokens")
            self._texts.append(stream.tokens)

    def _request(self, index: int, *, draft: bool = True) -> TokenRequest:
        return TokenRequest(index, _TEMPERATURES[index % 2], self._tokens, draft=draft)

    async def run(self, scene: Scene) -> Result:
        """Run a scene. Raises BenchError if the pools do not become whole again: later scenes would fail, too."""
        result = Result(scene, self._sessions)
        self._streams, self._asked, self._ending = [], [], False
        moved = await self._system.metric("outrider_reopened_sessions_total")
        clients = [asyncio.create_task(self._client(index)) for index in range(self._sessions)]
        try:
            async with asyncio.timeout(_STREAM_SECONDS):
                while not self._all_have_begun():
                    await asyncio.sleep(0.02)
            await asyncio.sleep(_BEFORE_SECONDS)
            times = await scene.act(self._system, scene.nodes, self._seconds)
            self._ending = True
            await asyncio.wait_for(asyncio.gather(*clients), _STREAM_SECONDS)
        except TimeoutError:
            raise BenchError(f"{scene.name}: the streams did not begin or end in {_STREAM_SECONDS:.0f} s") from None
        finally:
            for client in clients:
                client.cancel()
        result.noticed, result.whole = times.noticed, times.whole
        # A stream that began later has waited for its first token since then.
        result.pause = max(
            stream.pause(max(times.begun, asked))
            for stream, asked in zip(self._streams, self._asked, strict=True)
            if stream.times and stream.times[-1] > times.begun
        )
        result.moved = await self._system.metric("outrider_reopened_sessions_total") - moved
        self._compare(result)
        await self._levels(result)
        return result

    def _all_have_begun(self) -> bool:
        begun = {stream.request.index % self._sessions for stream in self._streams if stream.tokens}
        return len(begun) == self._sessions

    async def _client(self, index: int) -> None:
        """One request after the other, in turns over those whose texts are known."""
        while not self._ending:
            stream = Stream(self._request(index))
            self._streams.append(stream)
            self._asked.append(time.monotonic())
            await follow(self._system.url, stream, Readers())
            index = (index + self._sessions) % len(self._texts)

    def _compare(self, result: Result) -> None:
        result.answers = len(self._streams)
        for stream in self._streams:
            if stream.tokens == self._texts[stream.request.index] and not stream.error:
                result.equal += 1
            else:
                result.faults.append(f"request {stream.request.index} differs: {stream.error or 'another text'}")

    async def _levels(self, result: Result) -> None:
        """Wait until nothing is left of the load; name what is."""
        end, left = time.monotonic() + _SETTLE_SECONDS, ["the gateway does not answer"]
        while left and time.monotonic() < end:
            with suppress(OSError, aiohttp.ClientError, TimeoutError):
                left = await self._system.leftovers()
            if left:
                await asyncio.sleep(0.2)
        result.faults += left


async def run_all(campaign: Campaign, todo: Sequence[Scene], report: Any) -> list[Result]:
    """All scenes; `report` is called with each result."""
    await campaign.prepare()
    results = []
    for scene in todo:
        results.append(await campaign.run(scene))
        report(results[-1])
    return results
