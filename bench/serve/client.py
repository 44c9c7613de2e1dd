"""A client of an OpenAI-style server that records the arrival time of each piece of an answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from bench.harness.errors import BenchError
from bench.serve.outcome import EMPTY_ANSWER, Outcome, read_event

Endpoint = Literal["chat", "completions"]
_PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_DONE = b"[DONE]"
_CONNECT_TIMEOUT = 30.0  # seconds


@dataclass(frozen=True)
class Target:
    """A server and the form of its requests.

    body: fields of every request; None removes a field, for servers that reject unknown ones
    timeout: seconds for a whole answer
    """

    base_url: str
    endpoint: Endpoint = "chat"
    model: str = "default"
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0


def root_of(url: str) -> str:
    """The base URL of a server without a trailing /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Events:
    """A parser of server-sent events, fed with bytes that may be split anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data lines completed by these bytes; comments and other fields are skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def end(self) -> list[bytes]:
        """The data of a last line without a line break, at the end of the stream."""
        return self.feed(b"\n")


class Client:
    """Sends requests to one server. Use as an async context. clock: seconds since the start of the load."""

    def __init__(self, target: Target, clock: Callable[[], float] = time.perf_counter) -> None:
        self.target, self.clock = target, clock

    async def __aenter__(self) -> Client:
        # Servers close idle connections after 5 s or more: drop them earlier, to not send on a closing one.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        total = self.target.timeout if math.isfinite(self.target.timeout) else None
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=dict(self.target.headers),
            timeout=aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT_TIMEOUT),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(self, outcome: Outcome, content: Mapping[str, Any]) -> Outcome:
        """Send a request and record its answer, or its failure, in the outcome.

        content: further fields of the request: messages or prompt, seed, lengths.
        """
        target = self.target
        body: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {**target.body, **content}
        body = {name: value for name, value in body.items() if target.body.get(name, value) is not None}
        if not body.get("stream"):
            body.pop("stream_options", None)
        outcome.sent = self.clock()
        try:
            await self._request(outcome, orjson.dumps(body))
        except orjson.JSONEncodeError as error:  # a lone surrogate, or an integer beyond 64 bits
            outcome.fail("cannot be sent", str(error))
        except aiohttp.ConnectionTimeoutError:
            outcome.fail("no connection", f"none in {_CONNECT_TIMEOUT:g} s")
        except TimeoutError:
            outcome.fail("timeout", f"no whole answer in {target.timeout:g} s")
        except aiohttp.ClientConnectorError as error:
            outcome.fail("no connection", str(error))
        except aiohttp.ClientError as error:
            outcome.fail("broken stream" if outcome.pieces else "connection lost", f"{type(error).__name__}: {error}")
        except ValueError as error:
            outcome.fail("no JSON", str(error))
        outcome.ended = self.clock()
        if not outcome.pieces:
            outcome.fail(EMPTY_ANSWER, "no text was received")
        if not outcome.counted:
            outcome.output_tokens = len(outcome.pieces)
        return outcome

    async def _request(self, outcome: Outcome, body: bytes) -> None:
        url = root_of(self.target.base_url) + _PATHS[self.target.endpoint]
        headers = {"content-type": "application/json"}
        async with self._session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                outcome.fail(f"HTTP {response.status}", await _error_message(response))
            elif response.content_type == "text/event-stream":
                await self._stream(outcome, response)
            else:
                read_event(outcome, _object(await response.read()), self.clock())

    async def _stream(self, outcome: Outcome, response: aiohttp.ClientResponse) -> None:
        events, done, outcome.streamed = Events(), False, True
        async for data in response.content.iter_any():
            now = self.clock()
            done = self._read_events(outcome, events.feed(data), now) or done
        done = self._read_events(outcome, events.end(), self.clock()) or done
        if not (done or outcome.finish):
            outcome.fail("broken stream", "it ended without a finish reason and without [DONE]")

    def _read_events(self, outcome: Outcome, events: list[bytes], now: float) -> bool:
        """Record events in the outcome. Returns True if [DONE] is among them."""
        for event in events:
            if event and event != _DONE:
                read_event(outcome, _object(event), now)
        return _DONE in events

    async def page(self, path: str) -> str:
        """GET a page of the server. Raises BenchError with the reason if that fails."""
        try:
            async with self._session.get(root_of(self.target.base_url) + path) as response:
                if response.status != 200:
                    raise BenchError(f"GET {path}: HTTP {response.status}: {await _error_message(response)}")
                return await response.text(errors="replace")
        except (TimeoutError, aiohttp.ClientError) as error:
            raise BenchError(f"GET {path}: {error or 'no answer'}; is it up?") from error
        except ValueError as error:  # invalid headers
            raise BenchError(f"GET {path}: {error}") from error

    async def get(self, path: str) -> str | None:
        """GET a page of the server; None if that fails."""
        try:
            return await self.page(path)
        except BenchError:
            return None

    async def post(self, path: str) -> None:
        """POST without a body, such as /flush_cache. Raises BenchError if that fails."""
        try:
            async with self._session.post(root_of(self.target.base_url) + path) as response:
                if response.status != 200:
                    raise BenchError(f"POST {path}: HTTP {response.status}: {await _error_message(response)}")
        except (TimeoutError, aiohttp.ClientError) as error:
            raise BenchError(f"POST {path}: {error}") from error


def _object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError."""
    value = orjson.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} instead of an object")
    return value


async def _error_message(response: aiohttp.ClientResponse) -> str:
    """The message of an error response; servers differ in the shape of error bodies."""
    text = await response.text(errors="replace")
    try:
        body = orjson.loads(text)
        error = body.get("error", body)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return text
