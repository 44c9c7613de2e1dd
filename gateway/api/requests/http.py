"""Reads HTTP requests: JSON bodies, which must be valid Unicode, the request id, and the timeout.

Large bodies are parsed in a thread that yields to the event loop, so that commits are not delayed. The C parser holds
the interpreter lock, in a thread as well, unless it calls a Python function for each number and object: 4 MiB of token
ids then take 75 ms instead of 32 ms, and the event loop waits 6 ms at most.

Bodies with lone surrogates, such as `"\\ud83d"`, are refused: JSON allows them, but they cannot be encoded as UTF-8.
Clients send them after cutting a text between the two UTF-16 code units of a character, as JavaScript counts them.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from outrider.errors import InvalidRequest

REQUEST_ID = "outrider.request_id"  # key of the ASGI scope, set by the middleware
TIMEOUT = "x-request-timeout"  # header, in seconds
LARGE = 1 << 17  # bytes; parsing takes up to 2 ms
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # may be half of a valid pair, or an escaped backslash


class Route(APIRoute):
    """A route with this parser. HEAD is answered like GET; the server drops the body."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As in APIRoute."""
        return super().matches(_as_get(scope))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As in APIRoute."""
        await super().handle(_as_get(scope), receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As in APIRoute."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return handle


def _as_get(scope: Scope) -> Scope:
    """A copy for HEAD: the server still sees that method in its own scope, by which it drops the body."""
    return {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope


class _Request(Request):
    async def json(self) -> Any:
        """The parsed body. Raises ValueError, RecursionError."""
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = json.loads(body) if len(body) < LARGE else await asyncio.to_thread(parse_yielding, body)
        return self._json


def parse_yielding(body: bytes) -> Any:
    """The result of json.loads, computed with Python callbacks. Raises ValueError, RecursionError."""
    return json.loads(body, parse_int=_integer, parse_float=_float, object_hook=_object)


def _integer(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)


def _object(content: dict[str, Any]) -> dict[str, Any]:
    return content


def timeout_of(request: Request) -> float | None:
    """Seconds that the client allows for the answer, by header. Raises InvalidRequest."""
    given = request.headers.get(TIMEOUT)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{TIMEOUT} must be a number of seconds above 0, not {given}", param=TIMEOUT)
    return seconds


async def _check_unicode(request: Request) -> None:
    body = await request.body()
    # Bodies in UTF-16 and UTF-32 are accepted as well; the pattern does not match their escapes.
    if json.detect_encoding(body).startswith("utf-8") and _SURROGATE.search(body) is None:
        return
    try:
        content = await request.json()
        valid = is_valid(json.dumps(content, ensure_ascii=False))
    except ValueError:
        return  # invalid JSON is reported elsewhere
    if not valid:
        path = surrogate_path(content)
        raise InvalidRequest(
            f"{path or 'a key'} has half of a character, which is no Unicode; send all of it", param=path
        )


VALID_UNICODE = Depends(_check_unicode)
"""A dependency of routes with JSON bodies. Raises InvalidRequest."""


def is_valid(text: str) -> bool:
    """True if a text can be encoded, because it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def surrogate_path(content: Any) -> str | None:
    """Path of the first text with a lone surrogate, such as messages.0.content, or of the object with such a key.

    None if there is no path. Iterative and in one pass, because bodies are large and deep, and this blocks the event
    loop.
    """
    if isinstance(content, str):
        return None
    containers = [("", _entries(content))]  # the present container and those around it, with their keys

    def path(*key: str) -> str | None:
        return ".".join([*(outer for outer, _ in containers[1:]), *key]) or None

    while containers:
        for key, value in containers[-1][1]:
            if not is_valid(key):
                return path()
            if isinstance(value, str):
                if not is_valid(value):
                    return path(key)
            elif isinstance(value, dict | list):
                containers.append((key, _entries(value)))
                break
        else:
            containers.pop()
    return None


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        return iter(content.items())
    return ((str(i), value) for i, value in enumerate(content))
