"""The replay buffer of online training: segments of served sessions with the target's hidden states, in bounded memory.

    recent      the latest segments, of which a part is held out of the training
    sample      a uniform sample of all held-out segments since the start, to judge what is forgotten of earlier traffic

After an update of the target's weights segments are stale: their
states are those of the old weights. They are kept for a number of updates, because small updates change the states
little. The engine's thread writes, the training thread reads.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.draft.learning.records.store import Record

_FIRST_SESSIONS = 32
_ENTRY = np.dtype([("rows", "<u4"), ("first", "<u4"), ("temperature", "<f4")])


class Segment(NamedTuple):
    """A record in the buffer. number: in order of arrival; version: of the target's weights; key: uniform in [0, 1)."""

    record: Record
    number: int
    version: int
    key: float


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
class _Recent:
    """The latest segments of one kind, up to a number of bytes."""

    limit: int
    segments: deque[Segment] = field(default_factory=deque)
    bytes: int = 0

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.bytes += segment.record.rows.nbytes
        while self.bytes > self.limit:
            self.bytes -= self.segments.popleft().record.rows.nbytes

    def filtered(self, oldest: int) -> _Recent:
        return _filled(_Recent(self.limit), self.segments, oldest)


@dataclass
class _Sample:
    """A uniform sample of segments: those with the smallest keys, up to a number of bytes."""

    limit: int
    heap: list[tuple[float, int, Segment]] = field(default_factory=list)  # the largest key first
    bytes: int = 0

    @property
    def segments(self) -> list[Segment]:
        return sorted((segment for _, _, segment in self.heap), key=lambda segment: segment.number)

    def add(self, segment: Segment) -> None:
        heapq.heappush(self.heap, (-segment.key, segment.number, segment))
        self.bytes += segment.record.rows.nbytes
        while self.bytes > self.limit:
            self.bytes -= heapq.heappop(self.heap)[2].record.rows.nbytes

    def filtered(self, oldest: int) -> _Sample:
        return _filled(_Sample(self.limit), self.segments, oldest)


_Part = TypeVar("_Part", _Recent, _Sample)


def _filled(part: _Part, segments: Iterable[Segment], oldest: int) -> _Part:
    """A part with those segments that are of version `oldest` or later."""
    for segment in segments:
        if segment.version >= oldest:
            part.add(segment)
    return part


class ReplayBuffer:
    """Segments; those of one in `held_out` sessions are held out of the training, of the first ones more.

    learnt: trainable rows since the start; version: updates of the target's weights
    """

    def __init__(
        self, limit: int, row_bytes: int, length: int, context: int, held_out: int, versions: int = 8, seed: int = 0
    ) -> None:
        """limit: in bytes; half of it is for sessions that are being recorded.

        versions: updates of the target's weights for which segments are kept
        """
        assert 0 < 2 * context < length
        self.row_bytes, self.length, self.context = row_bytes, length, context
        self.learnt = self.version = 0
        self._held_out, self._versions = held_out, versions
        self._lock = threading.Lock()
        size = limit // 4 // held_out
        self._recent = {True: _Recent(size), False: _Recent(limit // 2 - 2 * size)}
        self._sample = _Sample(size)
        self.room = limit - limit // 2
        self._sessions = self._added = self._outdated = 0  # _outdated: segments at the last update
        self._keys = np.random.default_rng(seed)

    def next_held_out(self) -> bool:
        """True if the next session is to be held out: every other one at first, for enough to judge by."""
        self._sessions += 1
        every = min(2, self._held_out) if self._sessions <= _FIRST_SESSIONS else self._held_out
        return self._sessions % every == 0

    def reserve(self, size: int) -> bool:
        """Reserve bytes for a session that is being recorded; negative sizes release them. False without room."""
        if size > self.room:
            return False
        self.room -= size
        return True

    def add(self, record: Record, version: int | None = None) -> None:
        """Add a segment, and drop those beyond the limit. version: of the target's weights, by default the present."""
        with self._lock:
            self._added += 1
            segment = Segment(record, self._added, self.version if version is None else version, self._keys.random())
            if segment.version > self.version - self._versions:
                self._recent[record.held_out].add(segment)
                if record.held_out:
                    self._sample.add(segment)
                else:
                    self.learnt += learnt_rows_of(record)

    def outdate(self) -> None:
        """The target has other weights: later segments are of the next version, and the oldest are dropped.

        Nothing happens if no segment was added since the last time: several gateways may report the same update.
        """
        with self._lock:
            if self._added == self._outdated:
                return
            self.version, self._outdated = self.version + 1, self._added
            self._drop_before(self.version - self._versions + 1)

    def _drop_before(self, version: int) -> None:
        self._recent = {kind: part.filtered(version) for kind, part in self._recent.items()}
        self._sample = self._sample.filtered(version)

    # --- reading ---

    def recent(self, *, held_out: bool) -> list[Segment]:
        """The latest segments, oldest first."""
        with self._lock:
            return list(self._recent[held_out].segments)

    def sample(self) -> list[Segment]:
        """The sample of all held-out segments, oldest first."""
        with self._lock:
            return self._sample.segments

    def segments(self, chosen: Iterable[Segment]) -> Segments:
        """Segments as a source of batches."""
        return Segments([segment.record for segment in chosen], self.row_bytes)

    @property
    def recent_learnt(self) -> int:
        """Trainable rows of the recent segments."""
        return sum(learnt_rows_of(segment.record) for segment in self.recent(held_out=False))

    # --- state ---

    def snapshot(self) -> tuple[list[Segment], list[Segment]]:
        """All recent segments, and the sample."""
        with self._lock:
            return [segment for part in self._recent.values() for segment in part.segments], self._sample.segments

    def counters(self) -> dict[str, int]:
        """Counters for `restore`."""
        return {"learnt": self.learnt, "version": self.version, "sessions": self._sessions, "added": self._added}

    def restore(self, recent: Iterable[Segment], sample: Iterable[Segment], counters: Mapping[str, int]) -> None:
        """Take over another buffer's segments and counters.

        If the target's weights had been updated, it begins with others again, so the segments are of an older version.
        """
        with self._lock:
            for segment in sorted(recent, key=lambda segment: segment.number):
                self._recent[segment.record.held_out].add(segment)
            for segment in sample:
                self._sample.add(segment)
            self.learnt, self.version = counters["learnt"], counters["version"]
            self._sessions, self._added = counters["sessions"], counters["added"]
        self._keys = np.random.default_rng(self._added)
        if self.version:
            self.outdate()

    @property
    def bytes(self) -> int:
        """Size of all segments; those that are both recent and in the sample are counted twice."""
        with self._lock:
            return self._sample.bytes + sum(part.bytes for part in self._recent.values())


def min_bytes(row_bytes: int, length: int, held_out: int) -> int:
    """Smallest limit with room for a held-out segment, in bytes."""
    return 4 * held_out * length * row_bytes


def learnt_rows_of(record: Record) -> int:
    """Trainable rows of a segment (as of batches.learnt_rows)."""
    return max(len(record.rows) - 1 - max(record.first - 1, 0), 0)
