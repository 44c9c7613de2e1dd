"""Gives every HTTP request a span, which begins only if the request generates.

Plain ASGI, because streams pass through.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.requests.http import REQUEST_ID
from gateway.telemetry.spans import CURRENT, spanning
from outrider.tracing import Tracing, Value

_CHATS = ("chat", "responses")  # parts of the paths of chats


class Traced:
    """An app whose requests are traced."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        operation = "chat" if any(word in path for word in _CHATS) else "text_completion"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes: dict[str, Value] = {"http.request.method": scope["method"], "http.route": path}
        with spanning(self._tracing, operation, headers, scope.get(REQUEST_ID, ""), attributes) as span:

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status: int = message["status"]
                    span.attributes["http.response.status_code"] = status
                    kind = dict(message["headers"]).get(b"content-type", b"")
                    span.attributes["gen_ai.request.stream"] = kind.startswith(b"text/event-stream")
                    if status >= 400:
                        span.fail(str(status))
                await send(message)

            token = CURRENT.set(span)
            try:
                await self._app(scope, receive, sending)
            finally:
                CURRENT.reset(token)
