"""Hidden states beside cached prefix pages, in host memory: what a page's tokens gave when they were computed.

Without them a drafter would start blind on exactly those prompts that repeat, for cached rows are not computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]  # [rows, row bytes]


@dataclass
class _Tail:
    """Rows of a session that may still become part of a cached page. first: position of the first one, in tokens."""

    first: int = 0
    parts: list[_Bytes] = field(default_factory=list)

    def add(self, first: int, rows: _Bytes) -> None:
        end = self.first + sum(len(part) for part in self.parts)
        if first != end:
            self.first, self.parts = first, []
        self.parts.append(rows)

    def page(self, first: int, size: int) -> _Bytes | None:
        """The rows first .. first + size - 1 if all are here; those before them are forgotten."""
        whole = self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts) if self.parts else None
        start = first - self.first
        if whole is None or start < 0 or start + size > len(whole):
            return None
        self.first, self.parts = first + size, [whole[start + size :]]
        return whole[start : start + size].copy()


class FeatureStore:
    """A `PageObserver`: rows by page, up to a number of bytes; beyond it, those kept longest are let go."""

    def __init__(self, page_size: int, limit: int, taken: Callable[[int, int, _Bytes], None]) -> None:
        """page_size: in tokens. limit: in bytes. taken: told session, first position and rows of each page found."""
        self._page_size = page_size
        self._limit = limit
        self._taken = taken
        self._pages: dict[int, _Bytes] = {}
        self._tails: dict[int, _Tail] = {}
        self.bytes = 0

    def open(self, session_id: int) -> None:
        """Keep this session's rows."""
        self._tails[session_id] = _Tail()

    def close(self, session_id: int) -> None:
        """The session has given its pages back."""
        self._tails.pop(session_id, None)

    def add(self, session_id: int, first: int, rows: _Bytes) -> None:
        """Rows of committed tokens, as they were sent. first: position of the first one."""
        self._tails[session_id].add(first, rows)

    def forget(self) -> None:
        """Let everything go; sessions go on with rows to come."""
        self._pages.clear()
        self.bytes = 0
        for session_id in self._tails:
            self._tails[session_id] = _Tail()

    # --- what the prefix cache tells ---

    def page_cached(self, owner: int, index: int, page: int) -> None:
        """Keep the rows of a page that others may find."""
        tail = self._tails.get(owner)
        rows = tail.page(index * self._page_size, self._page_size) if tail is not None else None
        if rows is None or page in self._pages:
            return
        self._pages[page] = rows
        self.bytes += rows.nbytes
        while self.bytes > self._limit:
            self.page_dropped(next(iter(self._pages)))

    def page_taken(self, owner: int, index: int, page: int) -> None:
        """Hand a found page's rows to the session that found it."""
        if owner in self._tails and (rows := self._pages.get(page)) is not None:
            self._taken(owner, index * self._page_size, rows)

    def page_dropped(self, page: int) -> None:
        """Let a page's rows go."""
        rows = self._pages.pop(page, None)
        if rows is not None:
            self.bytes -= rows.nbytes
