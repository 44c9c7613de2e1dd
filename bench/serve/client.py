"""One client of an OpenAI-style server: asks, and notes when each piece of the answer comes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

from bench.harness.errors import BenchError
from bench.serve.outcome import SILENT, Outcome, take

Endpoint = Literal["chat", "completions"]
_PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_DONE = b"[DONE]"
_CONNECT = 30.0  # seconds until a server takes a connection


@dataclass(frozen=True)
class Target:
    """Whom to ask, and how.

    body: of every request; a field that is None in it is left out, for servers that refuse what they do not know
    timeout: seconds that an answer may take
    """

    base_url: str
    endpoint: Endpoint = "chat"
    model: str = "default"
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0


def root_of(url: str) -> str:
    """A server's root, also where its API's root was given."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Events:
    """The data of server-sent events, from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data lines that are complete with these bytes; comments and other fields are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def end(self) -> list[bytes]:
        """What is left when the stream has ended."""
        return self.feed(b"\n")


class Client:
    """Asks one server. Use as an async context; `clock` gives seconds since the load's start."""

    def __init__(self, target: Target, clock: Callable[[], float] = time.perf_counter) -> None:
        self.target, self.clock = target, clock

    async def __aenter__(self) -> Client:
        # Servers close idle connections after 5 s or more; one that is about to be closed must not be used.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        total = self.target.timeout if math.isfinite(self.target.timeout) else None
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=dict(self.target.headers),
            timeout=aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, outcome: Outcome, content: Mapping[str, Any]) -> Outcome:
        """Send a request and note its answer in the outcome; failures are noted there, too.

        content: what is asked beside the body of every request: messages or prompt, and what differs.
        """
        target = self.target
        body: dict[str, Any] = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {**target.body, **content}
        body = {name: value for name, value in body.items() if target.body.get(name, value) is not None}
        if not body.get("stream"):
            body.pop("stream_options", None)
        outcome.sent = self.clock()
        try:
            await self._ask(outcome, orjson.dumps(body))
        except orjson.JSONEncodeError as error:  # half a surrogate pair, or a number beyond 64 bits
            outcome.fail("cannot be sent", str(error))
        except aiohttp.ConnectionTimeoutError:
            outcome.fail("no connection", f"none in {_CONNECT:g} s")
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
            outcome.fail(SILENT, "no piece of text came")
        if not outcome.counted:
            outcome.output_tokens = len(outcome.pieces)
        return outcome

    async def _ask(self, outcome: Outcome, body: bytes) -> None:
        url = root_of(self.target.base_url) + _PATHS[self.target.endpoint]
        headers = {"content-type": "application/json"}
        async with self._session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                outcome.fail(f"HTTP {response.status}", await _message(response))
            elif response.content_type == "text/event-stream":
                await self._stream(outcome, response)
            else:
                take(outcome, _object(await response.read()), self.clock())

    async def _stream(self, outcome: Outcome, response: aiohttp.ClientResponse) -> None:
        events, done, outcome.streamed = Events(), False, True
        async for data in response.content.iter_any():
            now = self.clock()
            done = self._take(outcome, events.feed(data), now) or done
        done = self._take(outcome, events.end(), self.clock()) or done
        if not (done or outcome.finish):
            outcome.fail("broken stream", "it ended without a finish reason and without [DONE]")

    def _take(self, outcome: Outcome, events: list[bytes], now: float) -> bool:
        """Note what events say. True if the last one was among them."""
        for event in events:
            if event and event != _DONE:
                take(outcome, _object(event), now)
        return _DONE in events

    async def page(self, path: str) -> str:
        """A page of the server. Raises BenchError that says why there is none."""
        try:
            async with self._session.get(root_of(self.target.base_url) + path) as response:
                if response.status != 200:
                    raise BenchError(f"GET {path}: HTTP {response.status}: {await _message(response)}")
                return await response.text(errors="replace")
        except (TimeoutError, aiohttp.ClientError) as error:
            raise BenchError(f"GET {path}: {error or 'no answer'}; is it up?") from error
        except ValueError as error:  # headers that cannot be sent
            raise BenchError(f"GET {path}: {error}") from error

    async def get(self, path: str) -> str | None:
        """A page of the server; None if it has none or cannot be reached."""
        try:
            return await self.page(path)
        except BenchError:
            return None

    async def post(self, path: str) -> None:
        """Ask for something that has no answer, such as a flush. Raises BenchError if it is refused."""
        try:
            async with self._session.post(root_of(self.target.base_url) + path) as response:
                if response.status != 200:
                    raise BenchError(f"POST {path}: HTTP {response.status}: {await _message(response)}")
        except (TimeoutError, aiohttp.ClientError) as error:
            raise BenchError(f"POST {path}: {error}") from error


def _object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    value = orjson.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} instead of an object")
    return value


async def _message(response: aiohttp.ClientResponse) -> str:
    """What an error's body says; error bodies come in many shapes."""
    text = await response.text(errors="replace")
    try:
        body = orjson.loads(text)
        error = body.get("error", body)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return text
