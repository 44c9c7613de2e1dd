"""What sessions have left lately: pieces of their texts with the target's hidden states, in memory, within a bound.

    session   0 ............ prompt | answer ............................. |
    pieces              |context|   learnt    |
                                        |context|   learnt    |

A piece has at most `length` rows. While a prompt is read only its last `context` rows are kept, for answers are what is
learnt; a long answer becomes several pieces, each with the last rows of the one before it as context. The engine's
thread writes, another one reads.
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


class Pieces:
    """Some pieces, to be read as a trainer reads its store. entries: rows, first token to learn, temperature."""

    def __init__(self, records: Sequence[Record], row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._records = list(records)
        facts = [(len(record.rows), record.first, record.temperature) for record in self._records]
        self.entries = np.array(facts, _ENTRY)

    def __len__(self) -> int:
        return len(self._records)

    def tokens(self, index: int) -> NDArray[np.uint32]:
        """The tokens of a piece, one more than its rows."""
        return self._records[index].tokens

    def rows(self, index: int) -> NDArray[np.uint8]:
        """The hidden states of a piece, [m, row bytes]."""
        return self._records[index].rows


@dataclass
class _Part:
    """The latest pieces of one kind, up to a number of bytes."""

    limit: int
    records: deque[Record] = field(default_factory=deque)
    bytes: int = 0

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.bytes += record.rows.nbytes
        while self.bytes > self.limit:
            self.bytes -= self.records.popleft().rows.nbytes


class Ring:
    """The latest pieces; those of one session in so many are held back.

    learnt: rows to learn that have come since everything was last forgotten; forgotten: how often that was
    """

    def __init__(self, limit: int, row_bytes: int, length: int, context: int, held_out: int) -> None:
        """limit: in bytes, of which half are for what sessions under way have not handed over yet."""
        assert 0 < 2 * context < length
        self.row_bytes, self.length, self.context = row_bytes, length, context
        self.learnt = self.forgotten = 0
        self._held_out = held_out
        self._lock = threading.Lock()
        self._parts = {True: _Part(limit // 2 // held_out), False: _Part(limit // 2 - limit // 2 // held_out)}
        self._room = limit - limit // 2
        self._sessions = 0

    def begin(self, temperature: float, prompt: int) -> Recording:
        """Record a new session."""
        held_out = self._sessions % self._held_out == self._held_out - 1
        self._sessions += 1
        return Recording(self, temperature, prompt, held_out)

    def reserve(self, size: int) -> bool:
        """Take room for rows of a session under way, in bytes; negative sizes give it back. False if there is none."""
        if size > self._room:
            return False
        self._room -= size
        return True

    def add(self, record: Record) -> None:
        """Keep a piece, and forget the oldest ones for it."""
        with self._lock:
            self._parts[record.held_out].add(record)
            if not record.held_out:
                self.learnt += learnt_rows_of(record)

    def forget(self) -> None:
        """Let all pieces go. Sessions under way keep what they have."""
        with self._lock:
            self._parts = {kind: _Part(part.limit) for kind, part in self._parts.items()}
            self.learnt, self.forgotten = 0, self.forgotten + 1

    def pieces(self, *, held_out: bool) -> Pieces:
        """What there is at present."""
        with self._lock:
            return Pieces(list(self._parts[held_out].records), self.row_bytes)

    @property
    def bytes(self) -> int:
        """Size of all pieces."""
        with self._lock:
            return sum(part.bytes for part in self._parts.values())


class Recording:
    """One session under way. Its rows come in order; behind a gap nothing more is recorded."""

    def __init__(self, ring: Ring, temperature: float, prompt: int, held_out: bool) -> None:
        self._ring, self._temperature, self._held_out = ring, temperature, held_out
        self._start = 0  # position of the first row that is kept
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
        length = self._ring.length
        while len(rows):
            fitting = rows[: length - self._count]
            if not self._ring.reserve(fitting.nbytes):
                self._stop()
                return
            self._parts.append(fitting.copy())  # a view would keep the whole frame alive
            self._count += len(fitting)
            rows = rows[len(fitting) :]
            self._hand_over(tokens)

    def finish(self, tokens: NDArray[np.uint32]) -> None:
        """The session is over: hand over what is left."""
        if not self._over:
            self._emit(tokens)
        self._stop()

    def drop(self) -> None:
        """Record nothing more, and let go of what there is."""
        self._stop()

    def _hand_over(self, tokens: NDArray[np.uint32]) -> None:
        """Keep no more than context of a prompt; of an answer no more than a piece."""
        end = self._start + self._count
        if end < self._first:
            if self._count > 2 * self._ring.context:
                self._keep(self._ring.context)
        elif self._count == self._ring.length:
            self._emit(tokens)
            # The last row of a piece is not learnt: no row is known there that would foretell a token behind it.
            self._first = max(self._first, end)
            self._keep(self._ring.context)

    def _emit(self, tokens: NDArray[np.uint32]) -> None:
        count = min(self._count, len(tokens) - 1 - self._start)
        if count < 2:
            return
        rows = np.concatenate(self._parts)[:count]
        own = tokens[self._start : self._start + count + 1].copy()
        first = max(self._first - self._start, 0)
        record = Record(own, rows, first, first, self._temperature, 0, self._held_out)
        if learnt_rows_of(record):
            self._ring.add(record)

    def _keep(self, count: int) -> None:
        """Let go of all but the last rows."""
        rows = np.concatenate(self._parts)
        dropped = len(rows) - count
        self._ring.reserve(-dropped * self._ring.row_bytes)
        self._parts, self._count = [rows[dropped:].copy()], count
        self._start += dropped

    def _stop(self) -> None:
        self._ring.reserve(-self._count * self._ring.row_bytes)
        self._parts, self._count, self._over = [], 0, True


class RecordedRows(FeatureRows):
    """Rows of a session for its drafter, which a recording hears of, too."""

    def __init__(self, rows: FeatureRows, hear: Callable[[int, NDArray[np.uint8]], None]) -> None:
        """rows: what has come so far; it is taken over. hear: called with position and bytes of rows as they come."""
        super().__init__()
        self._hear = hear
        self.first, self.lost = rows.first, rows.lost
        if len(rows):
            self.add(rows.first, rows.take())

    def add(self, first: int, rows: NDArray[np.uint8]) -> None:
        """As of FeatureRows."""
        self._hear(first, rows)
        super().add(first, rows)


def least_bytes(row_bytes: int, length: int, held_out: int) -> int:
    """A limit that leaves room for a piece that is held back."""
    return 2 * held_out * length * row_bytes


def learnt_rows_of(record: Record) -> int:
    """Rows of a piece that can be learnt from (batches.py)."""
    return max(len(record.rows) - 1 - max(record.first - 1, 0), 0)
