"""Middleware of every HTTP request: body size limit, request id, API key.

Plain ASGI, because streams pass through.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission.admission import Keys
from gateway.admission.retry_after import time_away
from gateway.api.answers.errors import error_body, response_to
from gateway.api.requests.http import REQUEST_ID
from gateway.api.routes.page import FILES, starting_page
from outrider import telemetry
from outrider.errors import TooManyRequests, Unauthenticated

_HEADER = b"x-request-id"
_MAX_ID_LENGTH = 128
# This body is a whole checkpoint. The targets limit it by the size of their model.
_WEIGHTS, _WEIGHTS_BYTES = "/update_weights_from_tensor", 1 << 50


class EdgeMiddleware:
    """Refuses bodies that are too large, echoes or creates X-Request-Id, and answers 503 until `app` is set."""

    def __init__(self, max_body_bytes: int) -> None:
        self.app: ASGIApp = _Starting()
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(_HEADER, b"")[:_MAX_ID_LENGTH] or secrets.token_hex(12).encode()
        scope[REQUEST_ID] = request_id.decode("latin-1")
        telemetry.REQUEST_ID.set(scope[REQUEST_ID])
        scope["path"] = _SLASHES.sub("/", scope["path"])
        limit = _WEIGHTS_BYTES if scope["path"] == _WEIGHTS else self._limit
        body = _BoundedBody(receive, limit)
        refused = started = False

        async def sending(message: Message) -> None:
            nonlocal refused, started
            if message["type"] == "http.response.start":
                started = True
                if body.too_large:  # replaces the app's response
                    refused = True
                    await _refuse(send, request_id, limit)
                message["headers"] = [*message["headers"], (_HEADER, request_id)]
            if not refused:
                await send(message)

        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            await _refuse(send, request_id, limit)
            return
        try:
            await self.app(scope, body, sending)
        except asyncio.CancelledError:  # by the server at shutdown: the client stalls while sending or reading
            if not started:
                content = error_body("the gateway is shutting down; retry elsewhere", "server_error", "unavailable")
                await _send(
                    send, 503, content, [(_HEADER, request_id), (b"retry-after", b"1"), (b"connection", b"close")]
                )


class KeyCheck:
    """Requires an API key except on public routes, and limits the running requests of each key."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] in _PUBLIC or scope["path"].startswith(FILES):
            await self._app(scope, receive, send)
            return
        try:
            key = self._keys.check(dict(scope["headers"]).get(b"authorization", b""))
            with self._keys.request(key):
                await self._app(scope, receive, send)
        except (Unauthenticated, TooManyRequests) as error:
            await response_to(error)(scope, receive, send)


_LIVE = frozenset({"/health/live", "/live"})
_PUBLIC = _LIVE | {"/", "/health", "/health/ready", "/health_generate", "/ready", "/metrics"}
_SLASHES = re.compile("/{2,}")


class _BoundedBody:
    """Limits a body without a length. Raises HTTPException when it is too large.

    The app must not see the truncated body, which may be a valid request. Other messages pass.
    """

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = limit
        self.too_large = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.too_large = True
            raise HTTPException(413)  # FastAPI keeps this status; other exceptions would become 400
        return message


async def _refuse(send: Send, request_id: bytes, limit: int) -> None:
    body = error_body(f"the body is larger than {limit} bytes", "invalid_request_error", "request_too_large")
    await _send(send, 413, body, [(_HEADER, request_id), (b"connection", b"close")])


class _Starting:
    """The app until a target is connected."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503, or 200 on liveness routes."""
        del receive
        await _starting(scope, send, str(time_away(self._since)).encode())


async def _starting(scope: Scope, send: Send, seconds: bytes) -> None:
    assert scope["type"] == "http", "uvicorn is configured for HTTP only"
    reason = "the gateway is starting; it waits for a target service"
    if scope["path"] in _LIVE:
        await _send(send, 200, orjson.dumps({"status": "ok"}), [])
        return
    if scope["path"] == "/":
        await _send(send, 503, starting_page(), [(b"retry-after", b"1")], b"text/html; charset=utf-8")
        return
    if scope["path"] in _PUBLIC:
        body = orjson.dumps({"status": "unavailable", "missing": [f"target: {reason}"]})
    else:
        body = error_body(reason, "server_error", "unavailable")
    await _send(send, 503, body, [(b"retry-after", seconds)])


async def _send(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]], kind: bytes = b"application/json"
) -> None:
    start = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*start, *headers]})
    await send({"type": "http.response.body", "body": body})
