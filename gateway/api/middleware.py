"""Middleware of every HTTP request: where it comes from, size and pace of its body, request id, API key.

Plain ASGI, because streams pass through.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from contextlib import nullcontext

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission.access import Access
from gateway.admission.admission import Keys
from gateway.admission.caller import client_network
from gateway.admission.retry_after import time_away
from gateway.api.answers.errors import error_body, response_to
from gateway.api.requests.http import REQUEST_ID
from gateway.api.routes.page import FILES, starting_page
from outrider import telemetry
from outrider.errors import TooManyRequests, Unauthenticated

LOCAL = "outrider.local"  # key of the ASGI scope: the request came over the control socket
_HEADER = b"x-request-id"
_MAX_ID_LENGTH = 128
# This body is a whole checkpoint. The targets limit it by the size of their model.
_WEIGHTS, _WEIGHTS_BYTES = "/update_weights_from_tensor", 1 << 50


class EdgeMiddleware:
    """Refuses requests of foreign pages and bodies that are too large or too slow; gives each request an id.

    Answers 503 until `app` is set.
    """

    def __init__(self, max_body_bytes: int, access: Access | None = None, client_timeout: float | None = None) -> None:
        """access: refuses by headers; None for no such check. client_timeout: longest pause in a body, in seconds."""
        self.app: ASGIApp = _Starting()
        self._limit = max_body_bytes
        self._access = access
        self._timeout = client_timeout

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
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            await _refuse(send, request_id, limit)
            return
        if await self._refused(scope, send, request_id):
            return
        body = _BoundedBody(receive, limit, self._timeout)
        refused = started = False

        async def sending(message: Message) -> None:
            nonlocal refused, started
            if message["type"] == "http.response.start":
                started = True
                if body.failed:  # replaces the app's response
                    refused = True
                    await _refuse(send, request_id, limit, too_slow=body.too_slow)
                message["headers"] = [*message["headers"], (_HEADER, request_id)]
            if not refused:
                await send(message)

        try:
            await self.app(scope, body, sending)
        except asyncio.CancelledError:  # by the server at shutdown: the client stalls while sending or reading
            if not started:
                content = error_body("the gateway is shutting down; retry elsewhere", "server_error", "unavailable")
                await _send(
                    send, 503, content, [(_HEADER, request_id), (b"retry-after", b"1"), (b"connection", b"close")]
                )

    async def _refused(self, scope: Scope, send: Send, request_id: bytes) -> bool:
        """Answer a request that is refused by its headers; False for others."""
        if self._access is None:
            return False
        local = scope.get(LOCAL, False)
        refusal = self._access.refusal(scope["method"], scope["path"], scope["headers"], local=local)
        if refusal is None:
            return False
        body = error_body(refusal.message, "invalid_request_error", refusal.code)
        # Its body is not read, so that the connection cannot be used again.
        await _send(send, refusal.status, body, [(_HEADER, request_id), (b"connection", b"close")])
        return True


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
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            network = client_network(scope.get("client"))
            caller = self._keys.check(authorization, local=scope.get(LOCAL, False), network=network)
            with nullcontext() if scope["path"] == _ABORT else self._keys.request(caller):
                await self._app(scope, receive, send)
        except (Unauthenticated, TooManyRequests) as error:
            await response_to(error)(scope, receive, send)


_ABORT = "/abort_request"  # not limited, because it is of use just when many requests are running
_LIVE = frozenset({"/health/live", "/live", "/liveness"})
_PUBLIC = _LIVE | {"/", "/health", "/health/ready", "/health_generate", "/ready", "/readiness", "/metrics"}
_SLASHES = re.compile("/{2,}")


class _BoundedBody:
    """Limits a body without a length, and pauses in any. Raises HTTPException when it is too large or too slow.

    The app must not see the truncated body, which may be a valid request. Other messages pass.
    """

    def __init__(self, receive: Receive, limit: int, timeout: float | None) -> None:
        self._receive = receive
        self._left = limit
        self._timeout = timeout
        self._whole = False
        self.too_large = self.too_slow = False

    @property
    def failed(self) -> bool:
        """True if the app did not get the whole body."""
        return self.too_large or self.too_slow

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout(None if self._whole else self._timeout):  # later only a disconnect can come
                message = await self._receive()
        except TimeoutError:
            self.too_slow = True
            raise HTTPException(408) from None
        if message["type"] != "http.request":
            return message
        self._whole = not message.get("more_body", False)
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.too_large = True
            raise HTTPException(413)  # FastAPI keeps this status; other exceptions would become 400
        return message


async def _refuse(send: Send, request_id: bytes, limit: int, *, too_slow: bool = False) -> None:
    if too_slow:
        body = error_body("the rest of the body did not come in time", "invalid_request_error", "request_timeout")
    else:
        body = error_body(f"the body is larger than {limit} bytes", "invalid_request_error", "request_too_large")
    await _send(send, 408 if too_slow else 413, body, [(_HEADER, request_id), (b"connection", b"close")])


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
