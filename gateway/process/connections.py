"""HTTP connections before their requests: how many there are, and how long and how large a request's headers may be.

The server below (uvicorn) bounds none of these. The application bounds bodies, and what follows them.

    accepted ──► waits for headers ──► request in progress ──► waits for headers ──► ...
                 closed after --client-timeout, after 64 KiB without progress, or to make room for a new connection
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.api.answers.streaming import CONNECTION

log = logging.getLogger(__name__)

_MAX_UNPARSED = 1 << 16  # bytes of a request without a whole header section or any content
_CUT_SECONDS = 10.0  # for the client of an answer that was cut to read the reason
_RESERVED_FILES = 256  # open files of the process that are no REST connections
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)  # fmt: skip


class Connections:
    """The connections of one listener."""

    def __init__(self, limit: int, timeout: float, unread: Callable[[], None] = lambda: None) -> None:
        """limit: of connections. timeout: seconds from the first moment in which headers may come to their end.

        unread: called for each answer that is cut because its client does not read it
        """
        self.limit = limit
        self.timeout = timeout
        self.unread = unread
        self.count = 0
        self._idle: dict[BoundedHttp, None] = {}  # without a request in progress, the longest waiting first

    def enter(self, connection: BoundedHttp) -> bool:
        """Count a new connection. At the limit, close the one that has waited longest; False if none waits."""
        if self.count >= self.limit:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return False
            oldest.give_way()
        self.count += 1
        self._idle[connection] = None
        return True

    def leave(self, connection: BoundedHttp) -> None:
        """A counted connection was closed, or is about to be."""
        self.count -= 1
        self._idle.pop(connection, None)

    def waits(self, connection: BoundedHttp) -> None:
        """A counted connection has no request in progress."""
        self._idle[connection] = None

    def works(self, connection: BoundedHttp) -> None:
        """A counted connection has a request in progress."""
        self._idle.pop(connection, None)


class BoundedHttp(HttpToolsProtocol):
    """One connection. last_event: makes the last event of the stream in progress, if its client does not read it."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        """options: of the server."""
        super().__init__(**options)
        self._limits = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._unparsed = 0
        self._counted = False  # it is one of the listener's connections
        self.last_event: Callable[[], bytes] = bytes

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it."""
        self._counted = self._limits.enter(self)
        super().connection_made(transport)
        if self._counted:
            self._await_headers()
        else:
            self._end(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room for another."""
        self._headers_came()
        self._uncount()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close a connection that waits for headers, in favour of a new one."""
        self._end(b"")

    def _uncount(self) -> None:
        if self._counted:
            self._counted = False
            self._limits.leave(self)

    def _end(self, last: bytes) -> None:
        """Close the connection. Its peer need not agree, so it counts no longer."""
        self._headers_came()
        self._uncount()
        if self.transport.is_closing():
            return
        if last:
            self.transport.write(last)
            self.transport.close()
        else:
            self.transport.abort()

    def cut(self) -> None:
        """End the answer in progress, because its client does not read it. Its request ends as if the client had gone.

        A client that reads on soon gets what the gateway had sent, and then `last_event`, which has the reason.
        """
        self._limits.unread()
        cycle, last = self.cycle, self.last_event()
        if cycle is None or cycle.response_complete or not cycle.chunked_encoding or self.transport.is_closing():
            self._end(b"")
            return
        if last:
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))
        cycle.disconnected = True
        cycle.message_event.set()
        self.flow.resume_writing()
        self.transport.close()
        self.loop.call_later(_CUT_SECONDS, self.transport.abort)

    # --- requests ---

    def data_received(self, data: bytes) -> None:
        """Parse data, and count it until it makes a request progress."""
        if self.transport.is_closing():
            return
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > _MAX_UNPARSED:
            log.warning("a connection was closed: %d bytes made no request", self._unparsed)
            in_progress = self.cycle is not None and not self.cycle.response_complete
            self._end(b"" if in_progress else _TOO_LARGE)
        elif self._waits:
            self._await_headers()  # the rest of an answered request's body is bounded by it, too

    @property
    def _waits(self) -> bool:
        """True without a request in progress."""
        return self.cycle is None or self.cycle.response_complete

    def on_headers_complete(self) -> None:
        """A request begins."""
        self._unparsed = 0
        self._headers_came()
        if self._counted:
            self._limits.works(self)
        cast("dict[str, Any]", self.scope)[CONNECTION] = self
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The end of an answer."""
        super().on_response_complete()
        self.last_event = bytes
        if self._counted and not self.pipeline and self._waits:
            self._limits.waits(self)

    def _await_headers(self) -> None:
        """Close the connection unless headers come in time."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.timeout, self._too_late)

    def _headers_came(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        self._end(b"")


def possible_connections(wanted: int) -> int:
    """The number of connections that the process may have open, at most `wanted`; raises its limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    possible = wanted if soft == resource.RLIM_INFINITY else max(min(wanted, soft - _RESERVED_FILES), 1)
    if possible < wanted:
        log.warning(
            "%d open files are allowed, so that at most %d of the %d connections of --max-connections are accepted; "
            "raise the limit with ulimit -n", soft, possible, wanted,
        )  # fmt: skip
    return possible
