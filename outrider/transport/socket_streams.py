"""Streams whose frames go past gRPC: the engine thread reads and writes them itself, between its steps.

So a frame that an engine waits for wakes its thread and no other, and what a step says has left when the step ends. A
peer that is slow to read is waited for shortly, for the sake of frames longer than what a socket holds; what the engine
says meanwhile gathers.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from typing import Any, TypeVar

from outrider.errors import InvalidRequest
from outrider.serving.inbox import Inbox
from outrider.serving.messages import Message, SessionFailure, StepOutput
from outrider.transport.frame_socket import FrameSocket, message_of
from outrider.transport.outbox import Outbox, Routes

log = logging.getLogger(__name__)

_WAIT = 0.01  # seconds that a frame may take to go before others have their turn

Request = TypeVar("Request")
Response = TypeVar("Response")
Decode = Callable[[Request], tuple[Message, list[SessionFailure]]]
Encode = Callable[[StepOutput], Response]
Ended = Callable[[Exception | None], object]


class SocketStream:
    """One stream. Its owner is the engine thread."""

    def __init__(self, pipe: FrameSocket, kind: Any, ended: Ended) -> None:
        """kind: of the messages that come. ended: told, once, that the connection has ended, or why it must."""
        self.pipe = pipe
        self.kind = kind
        self.ended = ended
        self.outbox = Outbox(lambda: None)


class SocketStreams:
    """All such streams of an engine. Called in the engine thread alone."""

    def __init__(self, inbox: Inbox[Any], decode: Decode[Any], encode: Encode[Any]) -> None:
        """decode, encode: between frames and domain types."""
        self._inbox = inbox
        self._decode = decode
        self._encode = encode
        self._routes = Routes()
        self._streams: dict[Outbox, SocketStream] = {}

    def begin(self, stream: SocketStream) -> None:
        """Read and write a stream from here on."""
        self._streams[stream.outbox] = stream
        self._routes.enter(stream.outbox)
        self._watch(stream)

    def end(self, stream: SocketStream) -> None:
        """Close a stream, and the sessions that are still its own. Does nothing for one that has ended."""
        if self._streams.pop(stream.outbox, None) is None:
            return
        self._inbox.forget(stream.pipe.file)
        stream.pipe.close()
        if orphans := self._routes.leave(stream.outbox):
            self._inbox.put(Message(closes=orphans))

    def publish(self, output: StepOutput) -> None:
        """Say what a step says."""
        self._routes.route(output)
        for stream in list(self._streams.values()):
            self._guard(self._write, stream)

    # --- one stream ---

    def _watch(self, stream: SocketStream) -> None:
        self._inbox.watch(stream.pipe.file, lambda what: self._attend(stream, what), writes=stream.pipe.unsent)

    def _attend(self, stream: SocketStream, what: int) -> None:
        """A connection has something to say, or room for more."""
        if what & select.POLLOUT:
            self._guard(self._go_on, stream)
        if what & ~select.POLLOUT and stream.outbox in self._streams:
            self._guard(self._read, stream)

    def _guard(self, work: Callable[[SocketStream], None], stream: SocketStream) -> None:
        """Whatever goes wrong ends the stream, and harms nobody else."""
        try:
            work(stream)
        except (EOFError, OSError):
            self._lose(stream)
        except InvalidRequest as error:
            log.warning("a stream sent a frame that cannot be read: %s", error.message)
            self._lose(stream, error)
        except Exception as error:
            log.exception("a frame of a stream was not understood")
            self._lose(stream, error)

    def _lose(self, stream: SocketStream, why: Exception | None = None) -> None:
        self.end(stream)
        stream.ended(why)

    def _read(self, stream: SocketStream) -> None:
        for frame in stream.pipe.receive():
            message, failures = self._decode(message_of(stream.kind, frame))
            self._routes.note(message, stream.outbox)
            self._inbox.put(message)
            if failures:
                stream.outbox.fail(failures)
        self._write(stream)

    def _write(self, stream: SocketStream) -> None:
        """Send what there is to say, unless a frame is still on its way."""
        while stream.outbox.full and not stream.pipe.unsent:
            stream.pipe.send(self._encode(stream.outbox.take()).SerializeToString())
            if stream.pipe.unsent:
                self._wait(stream)

    def _wait(self, stream: SocketStream) -> None:
        """A frame is longer than what the socket holds: let the reader take some of it, again and again."""
        room, until = select.poll(), time.monotonic() + _WAIT
        room.register(stream.pipe.file, select.POLLOUT)
        while stream.pipe.unsent and (left := until - time.monotonic()) > 0 and room.poll(1e3 * left):
            stream.pipe.flush()
        self._watch(stream)

    def _go_on(self, stream: SocketStream) -> None:
        stream.pipe.flush()
        if not stream.pipe.unsent:
            self._watch(stream)
            self._write(stream)
