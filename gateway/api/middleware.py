"""What every HTTP request passes: a bound on its body, and a request id. Plain ASGI, for streams pass through here."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.errors import error_body

_ID = b"x-request-id"


class Edge:
    """Refuses bodies that are too large, and echoes or mints X-Request-Id."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(_ID) or secrets.token_hex(12).encode()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (_ID, request_id)]
            await send(message)

        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit:
            await self._refuse(sending)
            return
        body = _Bounded(receive, self._limit)
        try:
            await self._app(scope, body, sending)
        except _TooLarge:
            await self._refuse(sending)

    async def _refuse(self, send: Send) -> None:
        message = f"the body is larger than {self._limit} bytes"
        body = error_body(message, "invalid_request_error", "request_too_large")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 413, "headers": [*headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})


class _TooLarge(Exception):
    pass


class _Bounded:
    """Counts what a body without a length brings."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = limit

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _TooLarge
        return message
