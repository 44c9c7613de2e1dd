"""Streams over Unix sockets instead of gRPC: the engine thread reads and writes their frames itself, between its steps.

A frame that the engine waits for thus wakes one thread only, and the output of a step is sent before the step ends. For
a frame longer than the socket's buffer the engine waits a moment; for a slower peer, output collects in the stream's
outbox.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from outrider.errors import InvalidRequest
from outrider.serving.inbox import Inbox
from outrider.serving.loop import Arrival
from outrider.serving.messages import Message, SessionFailure, StepOutput
from outrider.transport.frame_socket import FrameSocket, message_of
from outrider.transport.outbox import Outbox, Routes

log = logging.getLogger(__name__)

_WRITE_SECONDS = 0.01  # maximum wait for a slow reader before the engine goes on

Request = TypeVar("Request")
Response = TypeVar("Response")
Decode = Callable[[Request], tuple[Message, list[SessionFailure]]]
Encode = Callable[[StepOutput], Response]
Ended = Callable[[Exception | None], object]


class SocketStream:
    """One stream. Owned by the engine thread."""

    def __init__(self, connection: FrameSocket, kind: Any, ended: Ended, peer: str = "") -> None:
        """kind: class of the received messages. ended: called once at the end, with the error or None. peer: as in
        Outbox.
        """
        self.connection = connection
        self.kind = kind
        self.ended = ended
        self.outbox = Outbox(peer)


class SocketStreams:
    """All socket streams of an engine. Called only in the engine thread."""

    def __init__(self, inbox: Inbox[Any], decode: Decode[Any], encode: Encode[Any], routes: Routes) -> None:
        """decode, encode: conversions between frames and domain types. routes: of all streams of the engine."""
        self._inbox = inbox
        self._decode = decode
        self._encode = encode
        self._routes = routes
        self._streams: dict[Outbox, SocketStream] = {}

    def begin(self, stream: SocketStream) -> None:
        """Start to read and write a stream."""
        self._streams[stream.outbox] = stream
        self._routes.enter(stream.outbox)
        self._watch(stream)

    def end(self, stream: SocketStream) -> None:
        """Close a stream and its sessions, before anything that waits is handled. Does nothing if it has ended."""
        if self._streams.pop(stream.outbox, None) is None:
            return
        self._inbox.forget(stream.connection.file)
        stream.connection.close()
        if orphans := self._routes.leave(stream.outbox):
            self._inbox.put_first(Message(closes=orphans))

    def drop(self, outbox: Outbox) -> None:
        """End the stream of an outbox, if it is one of these."""
        if (stream := self._streams.get(outbox)) is not None:
            self._lose(stream)

    def write_all(self) -> None:
        """Send the output that the routes have given to the streams."""
        for stream in list(self._streams.values()):
            self._guarded(self._write, stream)

    # --- one stream ---

    def _watch(self, stream: SocketStream) -> None:
        self._inbox.watch(
            stream.connection.file, lambda what: self._on_event(stream, what), writes=stream.connection.unsent
        )

    def _on_event(self, stream: SocketStream, what: int) -> None:
        """Handle a connection that can be read or written."""
        if what & select.POLLOUT:
            self._guarded(self._continue_writing, stream)
        if what & ~select.POLLOUT and stream.outbox in self._streams:
            self._guarded(self._read, stream)

    def _guarded(self, work: Callable[[SocketStream], None], stream: SocketStream) -> None:
        """Do some work for a stream; an error ends this stream and no other."""
        try:
            work(stream)
        except (EOFError, OSError):
            self._lose(stream)
        except InvalidRequest as error:
            log.warning("a stream is closed, because a frame cannot be decoded: %s", error.message)
            self._lose(stream, error)
        except Exception as error:
            log.exception("a stream is closed, because handling its frame failed")
            self._lose(stream, error)

    def _lose(self, stream: SocketStream, why: Exception | None = None) -> None:
        self.end(stream)
        stream.ended(why)

    def _read(self, stream: SocketStream) -> None:
        for frame in stream.connection.receive():
            message, failures = self._decode(message_of(stream.kind, frame))
            self._inbox.put(Arrival(message, partial(self._admit, stream, failures)))
        self._write(stream)

    def _admit(self, stream: SocketStream, failures: Sequence[SessionFailure], message: Message) -> Message:
        """As `CallStreams.admit`."""
        if stream.outbox not in self._streams:
            return Message()
        message, refused = self._routes.admit(message, stream.outbox)
        if failures or refused:
            stream.outbox.fail([*failures, *refused])
            self._guarded(self._write, stream)
        return message

    def _write(self, stream: SocketStream) -> None:
        """Send the outbox's content, unless part of a frame is still unsent."""
        while stream.outbox.full and not stream.connection.unsent:
            stream.connection.send(self._encode(stream.outbox.take()).SerializeToString())
            if stream.connection.unsent:
                self._wait(stream)

    def _wait(self, stream: SocketStream) -> None:
        """Send more of a frame that is longer than the socket's buffer, as the reader makes room."""
        room, until = select.poll(), time.monotonic() + _WRITE_SECONDS
        room.register(stream.connection.file, select.POLLOUT)
        while stream.connection.unsent and (left := until - time.monotonic()) > 0 and room.poll(1e3 * left):
            stream.connection.flush()
        self._watch(stream)

    def _continue_writing(self, stream: SocketStream) -> None:
        stream.connection.flush()
        if not stream.connection.unsent:
            self._watch(stream)
            self._write(stream)
