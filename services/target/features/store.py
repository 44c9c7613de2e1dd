"""Features of cached prefix pages, in host memory.

Cached tokens are not computed again, so without their features a drafter would have no context for exactly the prompts
that repeat.
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

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.first + sum(map(len, self.parts))

    def add(self, first: int, rows: _Bytes) -> None:
        if first != self.end:
            self.first, self.parts = first, []
        self.parts.append(rows)

    def page(self, first: int, size: int) -> _Bytes | None:
        """The rows first .. first + size - 1 if all are present. Forgets them and all rows before."""
        whole = self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts) if self.parts else None
        start = first - self.first
        if whole is None or start < 0 or start + size > len(whole):
            return None
        self.first, self.parts = first + size, [whole[start + size :]]
        return whole[start : start + size].copy()


class FeatureStore:
    """A `PageObserver` that keeps rows by page, up to a number of bytes, in LRU order.

    The prefix cache does not offer a page without rows to a session that must still send them, because its drafter
    would miss them.
    """

    def __init__(
        self,
        page_size: int,
        limit: int,
        lacks: Callable[[int, int], bool],
        taken: Callable[[int, int, _Bytes], None],
        catch_up: Callable[[], None],
    ) -> None:
        """page_size: in tokens. limit: in bytes.

        lacks: whether a session must still send rows before a position; taken: called with session, first position and
        rows of each page found; catch_up: adds rows whose fusion is deferred
        """
        self._lacks = lacks
        self._catch_up = catch_up
        self._page_size = page_size
        self._limit = limit
        self._taken = taken
        self._pages: dict[int, _Bytes] = {}  # in order of last use
        self._due: dict[int, tuple[int, int]] = {}  # pages whose rows are not complete: owner, and index in its table
        self._tails: dict[int, _Tail] = {}
        self.bytes = 0

    @property
    def pages(self) -> frozenset[int]:
        """The pages with rows."""
        return frozenset(self._pages)

    @property
    def pending(self) -> frozenset[int]:
        """Cached pages whose rows are not complete."""
        return frozenset(self._due)

    def open(self, session_id: int) -> None:
        """Keep this session's rows."""
        self._tails[session_id] = _Tail()

    def close(self, session_id: int) -> None:
        """The session has given its pages back."""
        if self._tails.pop(session_id, None) is not None:
            self._due = {page: due for page, due in self._due.items() if due[0] != session_id}

    def add(self, session_id: int, first: int, rows: _Bytes) -> None:
        """Add rows of committed tokens, as they were sent. first: position of the first one."""
        self._tails[session_id].add(first, rows)
        self._fill(session_id)

    def forget(self) -> None:
        """Drop all rows; open sessions continue with later rows."""
        self._pages.clear()
        self._due.clear()
        self.bytes = 0
        for session_id in self._tails:
            self._tails[session_id] = _Tail()

    # --- events of the prefix cache ---

    def page_cached(self, owner: int, index: int, page: int) -> None:
        """Keep the rows of a page that other sessions may find."""
        if owner in self._tails:
            self._due[page] = owner, index
            self._fill(owner)

    def page_offered(self, owner: int, index: int, page: int) -> bool:
        """False if the session must still send the page's rows, and they were dropped."""
        if owner not in self._tails or not self._lacks(owner, (index + 1) * self._page_size):
            return True
        if page in self._due:
            self._catch_up()
        return page in self._pages

    def page_taken(self, owner: int, index: int, page: int) -> None:
        """Send a found page's rows to the session that found it."""
        if owner in self._tails and (rows := self._pages.pop(page, None)) is not None:
            self._pages[page] = rows
            self._taken(owner, index * self._page_size, rows)

    def page_dropped(self, page: int) -> None:
        """Drop a page's rows."""
        self._due.pop(page, None)
        rows = self._pages.pop(page, None)
        if rows is not None:
            self.bytes -= rows.nbytes

    def _fill(self, owner: int) -> None:
        """Keep the rows of a session's pages that are complete by now."""
        tail, size = self._tails[owner], self._page_size
        for page, index in [(page, index) for page, (whose, index) in self._due.items() if whose == owner]:
            if (index + 1) * size > tail.end:
                return
            del self._due[page]
            rows = tail.page(index * size, size)
            if rows is not None and page not in self._pages:
                self._keep(page, rows)

    def _keep(self, page: int, rows: _Bytes) -> None:
        self._pages[page] = rows
        self.bytes += rows.nbytes
        while self.bytes > self._limit:
            self.page_dropped(next(iter(self._pages)))
