"""Streams over gRPC, written by the engine thread itself: a step's output leaves before the step ends, and wakes no
other thread of its process. The network thread reads and decodes frames.

While a frame is being written, the output of later steps collects in the stream's outbox. A write never blocks: gRPC
takes the frame, and reports later that it has passed flow control.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic

from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Message, SessionFailure
from outrider.transport.outbox import Outbox, Routes
from outrider.transport.socket_streams import Encode, Ended, Response

log = logging.getLogger(__name__)


class CallWriter(Generic[Response]):
    """Writes frames to a grpc.aio call from a thread other than its event loop's.

    The first part of grpc.aio's coroutine `write`, up to its only suspension, hands the frame to gRPC's core; it runs
    in the calling thread. The event loop completes the future that the coroutine waits for, and the coroutine is
    resumed at the next use. So there is no change of threads between a step and its frame.

    pending: the write that has not ended yet, and the future that it waits for
    """

    def __init__(self, context: Any) -> None:
        """context: of the call, with initial metadata sent. Created in the event loop's thread."""
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.pending: tuple[Coroutine[Any, Any, None], asyncio.Future[None]] | None = None
        self._awaited = False  # a callback is registered for the pending write

    @property
    def busy(self) -> bool:
        """True while a frame is being written. Raises ConnectionError if the last write failed."""
        if self.pending is None:
            return False
        write, written = self.pending
        if not written.done():
            return True
        self.pending, self._awaited = None, False
        with _lost_connection(), contextlib.suppress(StopIteration):
            write.send(None)
        return False

    def send(self, frame: Response) -> None:
        """Write a frame; the writer must not be busy. Raises ConnectionError if the call has ended."""
        write = self._context.write(frame)
        with _lost_connection(), contextlib.suppress(StopIteration):
            self.pending = (write, write.send(None))

    def when_idle(self, call: Callable[[], object]) -> None:
        """Call a function once in the event loop's thread, when the present write ends."""
        if self.pending is not None and not self._awaited:
            self._awaited = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the process ends
                self._loop.call_soon_threadsafe(self.pending[1].add_done_callback, lambda _: call())

    def close(self) -> None:
        """Let the last write end in the event loop."""

        def end() -> None:
            with contextlib.suppress(ConnectionError):
                _ = self.busy

        self._awaited = False
        self.when_idle(end)


@contextlib.contextmanager
def _lost_connection() -> Any:
    """Any error of a write means that its call has ended."""
    try:
        yield
    except StopIteration:
        raise
    except (Exception, asyncio.CancelledError) as error:
        raise ConnectionError(f"the call has ended: {error!r}") from None


class CallStream:
    """One stream. Owned by the engine thread."""

    def __init__(self, writer: CallWriter[Any], ended: Ended, peer: str = "") -> None:
        """ended: called once if the engine ends the stream, with the error or None. peer: as in Outbox."""
        self.writer = writer
        self.ended = ended
        self.outbox = Outbox(peer)


class CallStreams:
    """All streams of an engine that use gRPC. Called only in the engine thread."""

    def __init__(self, engine: EngineLoop, encode: Encode[Any], routes: Routes) -> None:
        """encode: from domain types to frames. routes: of all streams of the engine."""
        self._engine = engine
        self._encode = encode
        self._routes = routes
        self._streams: dict[Outbox, CallStream] = {}

    def begin(self, stream: CallStream) -> None:
        """Start to write a stream."""
        self._streams[stream.outbox] = stream
        self._routes.enter(stream.outbox)

    def end(self, stream: CallStream) -> None:
        """Close a stream's sessions, before anything that waits is handled. Does nothing if it has ended."""
        if self._streams.pop(stream.outbox, None) is None:
            return
        stream.writer.close()
        if orphans := self._routes.leave(stream.outbox):
            self._engine.inbox.put_first(Message(closes=orphans))

    def drop(self, outbox: Outbox) -> None:
        """End the stream of an outbox, if it is one of these."""
        if (stream := self._streams.get(outbox)) is not None:
            self._lose(stream)

    def admit(self, stream: CallStream, failures: Sequence[SessionFailure], message: Message) -> Message:
        """The part of a stream's message that is about its own sessions; nothing of a stream that has ended.

        failures: of sessions in the same frame that could not be decoded; their stream receives them
        """
        if stream.outbox not in self._streams:
            return Message()
        message, refused = self._routes.admit(message, stream.outbox)
        if failures or refused:
            stream.outbox.fail([*failures, *refused])
            self._write(stream)
        return message

    def write_all(self) -> None:
        """Send the output that the routes have given to the streams."""
        for stream in list(self._streams.values()):
            if stream.outbox.full:
                self._write(stream)

    def _write(self, stream: CallStream) -> None:
        """Send the outbox's content as far as the writer takes it; an error ends this stream and no other."""
        if stream.outbox not in self._streams:
            return
        try:
            while stream.outbox.full and not stream.writer.busy:
                stream.writer.send(self._encode(stream.outbox.take()))
        except ConnectionError as error:
            log.debug("a stream is closed: %s", error)
            self._lose(stream)
        except Exception as error:
            log.exception("a stream is closed, because its frame cannot be encoded")
            self._lose(stream, error)
        else:
            if stream.outbox.full:
                stream.writer.when_idle(lambda: self._engine.call(partial(self._write, stream)))

    def _lose(self, stream: CallStream, why: Exception | None = None) -> None:
        self.end(stream)
        stream.ended(why)
