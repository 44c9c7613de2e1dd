"""Clients of one or several gateways: each sends one streamed request after the other, and checks every text.

Tokens are counted in the bytes of the stream, because the clients share the cores with what is measured.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

from bench.harness.errors import BenchError
from bench.pools.engines import prompt_of
from bench.streams.fakes import VOCAB

_CHUNK = 1 << 16  # bytes
_TOKEN = b" w"  # how the text of each token begins
_NUMBER = re.compile(rb" w(\d+)")
_BEGIN_TIMEOUT, _POLL = 60.0, 0.01  # seconds
_STEPS_BETWEEN = 24  # different lengths of answers, so that they do not end together


@dataclass
class Answer:
    """An answer as it arrives. times, counts: of its pieces, and the tokens in each. prompt: its number.

    asked: when it was asked for
    """

    prompt: int
    tokens: int
    asked: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def within(self, start: float, end: float) -> int:
        """Tokens that arrived between two times."""
        return sum(self.counts[bisect.bisect_left(self.times, start) : bisect.bisect_left(self.times, end)])

    def pause(self, start: float, end: float) -> float:
        """The longest time between two pieces that began before `end` and ended after `start`, in seconds.

        What has lasted until `end` in an answer that is not whole counts.
        """
        times = [*self.times, *([end] if self.times and sum(self.counts) < self.tokens else [])]
        pairs = itertools.pairwise(times)
        return max((later - earlier for earlier, later in pairs if earlier < end and later > start), default=0.0)

    def wait(self, start: float, end: float) -> float:
        """The wait for the first token, in seconds, also one that has lasted until `end`; 0 outside of these times."""
        first = self.times[0] if self.times else end
        return first - self.asked if self.asked < end and first > start else 0.0


class Load:
    """Running clients. ports: of the gateways, in turns. answers: of each client."""

    def __init__(self, ports: Sequence[int], sessions: int, tokens: int, first: int = 0) -> None:
        """tokens: of an answer, about. first: number of the first prompt, so that no prompt is sent twice."""
        self._ports, self._tokens = ports, tokens
        self._numbers = itertools.count(first)
        self.answers: list[list[Answer]] = [[] for _ in range(sessions)]
        self._ended = False

    @property
    def all_answers(self) -> list[Answer]:
        """Of all clients."""
        return [answer for answers in self.answers for answer in answers]

    def pause(self, start: float, end: float) -> float:
        """The longest pause between two pieces of an answer, in seconds."""
        return max((answer.pause(start, end) for answer in self.all_answers), default=0.0)

    def wait(self, start: float, end: float) -> float:
        """The longest wait for a first token, in seconds."""
        return max((answer.wait(start, end) for answer in self.all_answers), default=0.0)

    async def begun(self) -> float:
        """Wait until each client has a first token. Returns the longest wait of those that began at once, in seconds.

        Raises BenchError if that takes too long.
        """
        end = time.monotonic() + _BEGIN_TIMEOUT
        while not all(answers and answers[0].times for answers in self.answers):
            if time.monotonic() > end:
                raise BenchError(f"some of {len(self.answers)} clients have no token after {_BEGIN_TIMEOUT:.0f} s")
            await asyncio.sleep(_POLL)
        return max(answers[0].times[0] - answers[0].asked for answers in self.answers)

    def arrival(self, prompt: int, since: float) -> float | None:
        """When the first tokens of an answer came after a time; None if there are none yet."""
        for answer in self.all_answers:
            if answer.prompt == prompt:
                place = bisect.bisect_left(answer.times, since)
                return answer.times[place] if place < len(answer.times) else None
        return None

    def tokens(self, start: float, end: float) -> list[int]:
        """Tokens of each client between two times."""
        return [sum(answer.within(start, end) for answer in answers) for answers in self.answers]

    async def _client(self, index: int) -> None:
        port = self._ports[index % len(self._ports)]
        # The first answers have different lengths, and so end one after the other.
        length = self._tokens + self._tokens * (index % _STEPS_BETWEEN) // _STEPS_BETWEEN
        while not self._ended:
            answer = Answer(next(self._numbers), length, time.monotonic())
            self.answers[index].append(answer)
            await self._ask(port, answer)
            length = self._tokens

    async def _ask(self, port: int, answer: Answer) -> None:
        prompt = prompt_of(answer.prompt)
        request = {"prompt": prompt, "max_tokens": answer.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = orjson.dumps(request)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
        head += "content-type: application/json\r\nconnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + body)
            received = bytearray()
            while piece := await reader.read(_CHUNK):
                # A token's beginning may be divided between two pieces.
                counted = (received[-1:] + piece).count(_TOKEN)
                received += piece
                if counted:
                    answer.times.append(time.monotonic())
                    answer.counts.append(counted)
        finally:
            writer.close()
        _check(answer, bytes(received), prompt[-1])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """The clients for the duration of the context; then the answers in progress are read to their end.

        Raises BenchError if a text differs from the one that is known, or a request fails.
        """
        tasks = [asyncio.create_task(self._client(index)) for index in range(len(self.answers))]
        inside = asyncio.current_task()
        failed: list[BaseException] = []

        def failing(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None and not failed:
                failed.append(error)
                if inside is not None and not self._ended:
                    inside.cancel()

        for task in tasks:
            task.add_done_callback(failing)
        try:
            yield self
            self._ended = True
            await asyncio.gather(*tasks)
        except BaseException:
            if failed:
                raise failed[0] from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _check(answer: Answer, received: bytes, last: int) -> None:
    """Raise BenchError unless an answer is whole and counts on from the last token of its prompt."""
    found = [int(one) for one in _NUMBER.findall(received)]
    expected = [(last + 1 + index) % VOCAB for index in range(answer.tokens)]
    if found != expected:
        same = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), len(found))
        what = received[-300:].decode(errors="replace") if len(found) < len(expected) else ""
        raise BenchError(f"an answer of {answer.tokens} tokens differs after {same} of {len(found)}: {what}")
