"""Bodies become objects; large ones in a thread that lets the event loop in, for commits must not wait.

The parser is C and keeps the interpreter to itself, in a thread, too. But where it calls Python for each number and
object, others get their turn there: 4 MiB of token ids take 75 ms instead of 32, and nobody waits longer than 6 ms.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

_LARGE = 1 << 17  # bytes, which take 2 ms at most


class Route(APIRoute):
    """A route whose bodies are read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As the framework's."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return handle


class _Request(Request):
    async def json(self) -> Any:
        """The body's content. Raises ValueError, RecursionError."""
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = json.loads(body) if len(body) < _LARGE else await asyncio.to_thread(patiently, body)
        return self._json


def patiently(body: bytes) -> Any:
    """What json.loads gives. Raises ValueError, RecursionError."""
    return json.loads(body, parse_int=_integer, parse_float=_float, object_hook=_object)


def _integer(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)


def _object(content: dict[str, Any]) -> dict[str, Any]:
    return content
