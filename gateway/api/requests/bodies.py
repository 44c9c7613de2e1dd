"""Parses JSON bodies; large ones in a thread that yields to the event loop, so that commits are not delayed.

The C parser holds the interpreter lock, in a thread as well, unless it calls a Python function for each number and
object: 4 MiB of token ids then take 75 ms instead of 32 ms, and the event loop waits 6 ms at most.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

LARGE = 1 << 17  # bytes; parsing takes up to 2 ms


class Route(APIRoute):
    """A route with this parser."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As in APIRoute."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return handle


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
