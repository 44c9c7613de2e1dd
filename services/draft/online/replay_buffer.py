"""The replay buffer of online training: segments of recent sessions with the target's hidden states, in bounded memory.

    session    0 ............ prompt | answer ............................. |
    segments            |context|   trained   |
                                        |context|   trained   |

A segment has at most `length` rows. During a prompt only its last `context` rows are kept, because answers are trained;
a long answer becomes several segments, each with the last rows of the one before as context. The engine's thread
writes, the training thread reads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.draft.learning.store import Record
from services.draft.sessions.features import FeatureRows

_ENTRY = np.dtype([("rows", "<u4"), ("first", "<u4"), ("temperature", "<f4")])


class Segments:
    """Some segments, with the interface of a store's reader. entries: rows, first token to learn, temperature."""

    def __init__(self, records: Sequence[Record], row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._records = list(records)
        facts = [(len(record.rows), record.first, record.temperature) for record in self._records]
        self.entries = np.array(facts, _ENTRY)

    def __len__(self) -> int:
        return len(self._records)

    def tokens(self, index: int) -> NDArray[np.uint32]:
        """The tokens of a segment, one more than its rows."""
        return self._records[index].tokens

    def rows(self, index: int) -> NDArray[np.uint8]:
        """The hidden states of a segment, [m, row bytes]."""
        return self._records[index].rows


@dataclass
class _Part:
    """The latest segments of one kind, up to a number of bytes."""

    limit: int
    records: deque[Record] = field(default_factory=deque)
    bytes: int = 0

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.bytes += record.rows.nbytes
        while self.bytes > self.limit:
            self.bytes -= self.records.popleft().rows.nbytes


class ReplayBuffer:
    """The latest segments; those of one in `held_out` sessions are held out of the training.

    learnt: trainable rows since the last clear; clears: number of clears
    """

    def __init__(self, limit: int, row_bytes: int, length: int, context: int, held_out: int) -> None:
        """limit: in bytes; half of it is for sessions that are being recorded."""
        assert 0 < 2 * context < length
        self.row_bytes, self.length, self.context = row_bytes, length, context
        self.learnt = self.clears = 0
        self._held_out = held_out
        self._lock = threading.Lock()
        self._parts = {True: _Part(limit // 2 // held_out), False: _Part(limit // 2 - limit // 2 // held_out)}
        self.room = limit - limit // 2
        self._sessions = 0

    def record(self, temperature: float, prompt: int) -> SessionRecording:
        """Record a new session."""
        held_out = self._sessions % self._held_out == self._held_out - 1
        self._sessions += 1
        return SessionRecording(self, temperature, prompt, held_out)

    def reserve(self, size: int) -> bool:
        """Reserve bytes for a session that is being recorded; negative sizes release them. False without room."""
        if size > self.room:
            return False
        self.room -= size
        return True

    def add(self, record: Record) -> None:
        """Add a segment, and drop the oldest ones beyond the limit."""
        with self._lock:
            self._parts[record.held_out].add(record)
            if not record.held_out:
                self.learnt += learnt_rows_of(record)

    def clear(self) -> None:
        """Drop all segments. Sessions that are being recorded keep their rows."""
        with self._lock:
            self._parts = {kind: _Part(part.limit) for kind, part in self._parts.items()}
            self.learnt, self.clears = 0, self.clears + 1

    def segments(self, *, held_out: bool) -> Segments:
        """The present segments."""
        with self._lock:
            return Segments(list(self._parts[held_out].records), self.row_bytes)

    @property
    def bytes(self) -> int:
        """Size of all segments."""
        with self._lock:
            return sum(part.bytes for part in self._parts.values())


class SessionRecording:
    """The recording of one session. Rows arrive in order; it ends at a gap."""

    def __init__(self, buffer: ReplayBuffer, temperature: float, prompt: int, held_out: bool) -> None:
        self._buffer, self._temperature, self._held_out = buffer, temperature, held_out
        self._start = 0  # position of the first row
        self._first = prompt  # position of the first token to learn
        self._parts: list[NDArray[np.uint8]] = []
        self._count = 0
        self._over = False

    def add(self, first: int, rows: NDArray[np.uint8], tokens: NDArray[np.uint32]) -> None:
        """Rows from position `first` on, [n, row bytes], bfloat16; they are copied. tokens: all committed ones."""
        end = self._start + self._count
        if self._over or first > end:
            self._stop()
            return
        rows = rows[end - first :]
        length = self._buffer.length
        while len(rows):
            fitting = rows[: length - self._count]
            if not self._buffer.reserve(fitting.nbytes):
                self._stop()
                return
            self._parts.append(fitting.copy())  # a view would keep the whole frame in memory
            self._count += len(fitting)
            rows = rows[len(fitting) :]
            self._hand_over(tokens)

    def finish(self, tokens: NDArray[np.uint32]) -> None:
        """The session has ended: store the remaining rows."""
        if not self._over:
            self._emit(tokens)
        self._stop()

    def drop(self) -> None:
        """Discard the recording."""
        self._stop()

    def _hand_over(self, tokens: NDArray[np.uint32]) -> None:
        """Keep only context of a prompt; store a full segment of an answer."""
        end = self._start + self._count
        if end < self._first:
            if self._count > 2 * self._buffer.context:
                self._keep(self._buffer.context)
        elif self._count == self._buffer.length:
            self._emit(tokens)
            # The last row of a segment is not trained, because its next row is not in the segment.
            self._first = max(self._first, end)
            self._keep(self._buffer.context)

    def _emit(self, tokens: NDArray[np.uint32]) -> None:
        count = min(self._count, len(tokens) - 1 - self._start)
        if count < 2:
            return
        rows = np.concatenate(self._parts)[:count]
        own = tokens[self._start : self._start + count + 1].copy()
        first = max(self._first - self._start, 0)
        record = Record(own, rows, first, first, self._temperature, 0, self._held_out)
        if learnt_rows_of(record):
            self._buffer.add(record)

    def _keep(self, count: int) -> None:
        """Drop all but the last rows."""
        rows = np.concatenate(self._parts)
        dropped = len(rows) - count
        self._buffer.reserve(-dropped * self._buffer.row_bytes)
        self._parts, self._count = [rows[dropped:].copy()], count
        self._start += dropped

    def _stop(self) -> None:
        self._buffer.reserve(-self._count * self._buffer.row_bytes)
        self._parts, self._count, self._over = [], 0, True


class RecordedFeatures(FeatureRows):
    """The received rows of a session, which are passed to a recording as well."""

    def __init__(self, rows: FeatureRows, on_rows: Callable[[int, NDArray[np.uint8]], None]) -> None:
        """rows: those received so far, taken over. hear: called with position and bytes of received rows."""
        super().__init__()
        self._on_rows = on_rows
        self.first, self.lost = rows.first, rows.lost
        if len(rows):
            self.add(rows.first, rows.take())

    def add(self, first: int, rows: NDArray[np.uint8]) -> None:
        """As of FeatureRows."""
        self._on_rows(first, rows)
        super().add(first, rows)


def min_bytes(row_bytes: int, length: int, held_out: int) -> int:
    """Smallest limit with room for a held-out segment, in bytes."""
    return 2 * held_out * length * row_bytes


def learnt_rows_of(record: Record) -> int:
    """Trainable rows of a segment (as of batches.learnt_rows)."""
    return max(len(record.rows) - 1 - max(record.first - 1, 0), 0)
