"""Clients of the system under test: streams whose tokens, and the times between them, are recorded."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from bench.serve.client import Events

_OPENINGS = ("a b a b a b", "the quick brown fox", "so so so", "12345", "hello there", "x", "Zürich", "end of list")
_SMALL_BUFFER = 4096  # bytes of a slow reader's socket, so that its server notices
_LIMIT = 400.0  # seconds for a whole answer


@dataclass(frozen=True)
class Request:
    """One request; equal ones have equal answers."""

    index: int
    temperature: float
    tokens: int
    slow: bool = False
    """The client asks for large chunks, and may stop reading."""
    draft: bool = True

    def body(self) -> dict[str, Any]:
        """As the gateway takes it."""
        prompt = f"{_OPENINGS[self.index % len(_OPENINGS)]} {self.index}"
        body: dict[str, Any] = {
            "model": "default", "prompt": prompt, "max_tokens": self.tokens, "temperature": self.temperature,
            "seed": 7 + self.index, "ignore_eos": True, "return_token_ids": True, "stream": True,
        }  # fmt: skip
        if self.slow:
            body["logprobs"] = 5
        if not self.draft:
            body["speculation"] = "off"
        return body


@dataclass
class Stream:
    """An answer as it arrives. times: of its chunks; error: how it broke, empty if it is whole."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    finished: bool = False

    def pause(self, since: float) -> float:
        """The longest time without a token, in seconds, from `since` on."""
        times = [since, *(one for one in self.times if one > since)]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


class Readers:
    """Lets slow readers read, or not."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    def stop(self) -> None:
        """Slow readers stop reading."""
        self._open.clear()

    def go_on(self) -> None:
        """They read again."""
        self._open.set()

    async def wait(self) -> None:
        """Until slow readers may read."""
        await self._open.wait()


async def follow(url: str, stream: Stream, readers: Readers) -> None:
    """Send a request and read its answer to the end. What goes wrong is recorded in the stream."""
    request = stream.request
    connector = aiohttp.TCPConnector(force_close=True, socket_factory=_small_socket if request.slow else None)
    timeout = aiohttp.ClientTimeout(total=_LIMIT)
    events = Events()
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2048) as session,
            session.post(f"{url}/v1/completions", data=orjson.dumps(request.body()), headers=_HEADERS) as answer,
        ):
            if answer.status != 200:
                stream.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                return
            async for data in answer.content.iter_any():
                for event in events.feed(data):
                    _take(stream, event)
                if request.slow:
                    await readers.wait()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    if not stream.finished and not stream.error:
        stream.error = "the stream ended early"


_HEADERS = {"content-type": "application/json"}


def _take(stream: Stream, event: bytes) -> None:
    if event == b"[DONE]":
        return
    chunk = orjson.loads(event)
    if "error" in chunk:
        stream.error = f"error event: {chunk['error']}"
        return
    for choice in chunk["choices"]:
        new = choice.get("token_ids") or []
        if new:
            stream.tokens += new
            stream.times.append(time.monotonic())
        stream.finished |= choice.get("finish_reason") == "length"


def _small_socket(info: Any) -> socket.socket:
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    made.setblocking(False)
    return made
