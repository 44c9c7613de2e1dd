"""What the engine thread waits for: messages of other threads, and connections that it reads and writes itself.

A frame that another thread reads reaches the engine by way of two wake-ups, each with its turn at the interpreter. One
that the engine thread reads itself takes one.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_READ, _WRITE = select.POLLIN, select.POLLOUT


class Inbox(Generic[Item]):
    """A queue of one reader, who wakes up for connections, too. All but `put` is for the reader's thread."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._asleep = False  # somebody who puts must ring
        self._wake_pair: tuple[socket.socket, socket.socket] | None = None
        self._poll = select.poll()
        self._sources: dict[int, Callable[[int], None]] = {}

    def put(self, item: Item) -> None:
        """Add an item; any thread may call."""
        self._items.append(item)
        if self._asleep:
            self._wake()

    def _wake(self) -> None:
        assert self._wake_pair is not None, "who sleeps has a bell"
        with contextlib.suppress(OSError):  # it has been rung often enough, or the reader has gone
            self._wake_pair[1].send(b"\0")

    def open(self) -> None:
        """Begin to read."""
        self._wake_pair = here, there = socket.socketpair()
        here.setblocking(False)
        there.setblocking(False)
        self.watch(here.fileno(), lambda _: self._drain_wake())

    def _drain_wake(self) -> None:
        assert self._wake_pair is not None, "an open inbox has a bell"
        self._wake_pair[0].recv(4096)

    def close(self) -> None:
        """The reader goes. Items may still be put, and taken out by `get` without waiting."""
        if self._wake_pair is not None:
            bell, self._wake_pair = self._wake_pair, None
            for end in bell:
                end.close()
        self._sources.clear()
        self._poll = select.poll()

    # --- connections ---

    def watch(self, file: int, call: Callable[[int], None], *, writes: bool = False) -> None:
        """Let `get` call somebody when a connection can be read (writes: or written), with poll's events.

        Whoever is named for the same file later takes the place of the one before.
        """
        self._poll.register(file, _READ | _WRITE if writes else _READ)
        self._sources[file] = call

    def forget(self, file: int) -> None:
        """Watch a connection no more."""
        if self._sources.pop(file, None) is not None:
            self._poll.unregister(file)

    # --- waiting ---

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[int]]:
        """While the reader does something that it would leave for a message: files, one of which can then be read."""
        self._asleep = True
        try:
            if self._items:  # something may have come before the bell could ring
                self._wake()
            yield list(self._sources)
        finally:
            self._asleep = False

    def get(self, seconds: float | None = 0.0) -> Item:
        """The next item; waits so long for one, None for ever. Raises queue.Empty if none has come.

        What watched connections have is heard first, so that it is not later than what another thread reads.
        """
        until = None if seconds is None else time.monotonic() + seconds
        self._poll_sources(0.0)
        while not self._items:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0.0:
                raise queue.Empty
            self._asleep = True
            self._poll_sources(0.0 if self._items else left)  # something may have come before the bell could ring
        return self._items.popleft()

    def _poll_sources(self, seconds: float | None) -> None:
        # In whole milliseconds, of which the first is waited for in full.
        wait = None if seconds is None else round(max(1e3 * seconds, 1.0)) if seconds > 0.0 else 0
        found = self._poll.poll(wait)
        self._asleep = False
        for file, what in found:
            if (call := self._sources.get(file)) is not None:
                call(what)
