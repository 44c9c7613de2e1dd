"""The engine thread's inbox: messages from other threads, and connections that the engine thread reads and writes.

A frame that another thread reads takes two wake-ups to reach the engine, each of which waits for Python's global lock.
A frame that the engine thread reads itself takes one.
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
    """A queue whose reader also wakes up for connections. All methods but `put` are for the reader's thread."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._asleep = False  # the reader waits, so `put` must wake it
        self._interruptible = False  # the reader works; an item may interrupt it
        self._wake_pair: tuple[socket.socket, socket.socket] | None = None
        self._poll = select.poll()
        self._sources: dict[int, Callable[[int], None]] = {}

    def put(self, item: Item, *, interrupts: bool = True) -> None:
        """Add an item; any thread may call. interrupts: work that watches `message_files` ends early for it."""
        self._items.append(item)
        if self._asleep or (interrupts and self._interruptible):
            self._wake()

    def put_first(self, item: Item) -> None:
        """Add an item before all that wait; only for the reader's thread."""
        self._items.appendleft(item)

    def _wake(self) -> None:
        assert self._wake_pair is not None, "only an open inbox waits"
        with contextlib.suppress(OSError):  # the socket is full of wake-ups, or the reader has closed it
            self._wake_pair[1].send(b"\0")

    def open(self) -> None:
        """Start to read: create the wake-up sockets."""
        self._wake_pair = here, there = socket.socketpair()
        here.setblocking(False)
        there.setblocking(False)
        self.watch(here.fileno(), lambda _: self._drain_wake())

    def _drain_wake(self) -> None:
        assert self._wake_pair is not None, "an open inbox has wake-up sockets"
        self._wake_pair[0].recv(4096)

    def close(self) -> None:
        """Stop reading. Items can still be put, and be taken by `get` without waiting."""
        if self._wake_pair is not None:
            pair, self._wake_pair = self._wake_pair, None
            for end in pair:
                end.close()
        self._sources.clear()
        self._poll = select.poll()

    # --- connections ---

    def watch(self, file: int, call: Callable[[int], None], *, writes: bool = False) -> None:
        """Let `get` call a function, with poll's events, when a connection can be read.

        file: descriptor of the connection; a later call for the same file replaces the function. writes: also when the
        connection can be written
        """
        self._poll.register(file, _READ | _WRITE if writes else _READ)
        self._sources[file] = call

    def forget(self, file: int) -> None:
        """Stop watching a connection."""
        if self._sources.pop(file, None) is not None:
            self._poll.unregister(file)

    # --- waiting ---

    @contextlib.contextmanager
    def message_files(self) -> Iterator[list[int]]:
        """Descriptors, one of which becomes readable once a message arrives, for work that a message interrupts."""
        self._interruptible = True
        try:
            if self._items:  # items that arrived before `_interruptible` was set did not wake the reader
                self._wake()
            yield list(self._sources)
        finally:
            self._interruptible = False

    def get(self, seconds: float | None = 0.0) -> Item:
        """The next item. seconds: maximum wait; None waits without limit. Raises queue.Empty if none arrives.

        Watched connections are read first, so that their frames are not later than those of another thread.
        """
        until = None if seconds is None else time.monotonic() + seconds
        self._poll_sources(0.0)
        while not self._items:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0.0:
                raise queue.Empty
            self._asleep = True
            self._poll_sources(0.0 if self._items else left)  # an item may have arrived before `_asleep` was set
        return self._items.popleft()

    def _poll_sources(self, seconds: float | None) -> None:
        # poll takes whole milliseconds; a wait above 0 is at least one.
        wait = None if seconds is None else round(max(1e3 * seconds, 1.0)) if seconds > 0.0 else 0
        found = self._poll.poll(wait)
        self._asleep = False
        for file, what in found:
            if (call := self._sources.get(file)) is not None:
                call(what)
