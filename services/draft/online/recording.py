"""Recordings of sessions that are being served: their tokens and hidden states, cut into segments.

    session    0 ............ prompt | answer ............................. |
    segments            |context|   trained   |
                                        |context|   trained   |

A segment has at most `length` rows. During a prompt only its last `context` rows are kept, because answers are trained;
a long answer becomes several segments, each with the last rows of the one before as context.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.draft.learning.records.store import Record
from services.draft.online.replay_buffer import ReplayBuffer, learnt_rows_of
from services.draft.sessions.features import FeatureRows


class SessionRecording:
    """The recording of one session. Rows arrive in order; it ends at a gap."""

    def __init__(self, buffer: ReplayBuffer, temperature: float, prompt: int) -> None:
        """prompt: its length in tokens."""
        self._buffer, self._temperature = buffer, temperature
        self._held_out, self._version = buffer.next_held_out(), buffer.version
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
            self._buffer.add(record, self._version)

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
