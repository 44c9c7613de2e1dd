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

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.first + sum(map(len, self.parts))

    def add(self, first: int, rows: _Bytes) -> None:
        if first != self.end:
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
    """A `PageObserver`: rows by page, up to a number of bytes; beyond it, those unused for longest are let go.

    A session that has yet to send a page's rows is not offered it without them: its drafter could not go on behind it.
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

        lacks: whether a session has yet to send rows before a position; taken: told session, first position and rows of
        each page found; catch_up: adds rows that were put off
        """
        self._lacks = lacks
        self._catch_up = catch_up
        self._page_size = page_size
        self._limit = limit
        self._taken = taken
        self._pages: dict[int, _Bytes] = {}  # those used last come last
        self._due: dict[int, tuple[int, int]] = {}  # pages whose rows are yet to come: owner, and place in its table
        self._tails: dict[int, _Tail] = {}
        self.bytes = 0

    def open(self, session_id: int) -> None:
        """Keep this session's rows."""
        self._tails[session_id] = _Tail()

    def close(self, session_id: int) -> None:
        """The session has given its pages back."""
        if self._tails.pop(session_id, None) is not None:
            self._due = {page: due for page, due in self._due.items() if due[0] != session_id}

    def add(self, session_id: int, first: int, rows: _Bytes) -> None:
        """Rows of committed tokens, as they were sent. first: position of the first one."""
        self._tails[session_id].add(first, rows)
        self._fill(session_id)

    def forget(self) -> None:
        """Let everything go; sessions go on with rows to come."""
        self._pages.clear()
        self._due.clear()
        self.bytes = 0
        for session_id in self._tails:
            self._tails[session_id] = _Tail()

    # --- what the prefix cache tells ---

    def page_cached(self, owner: int, index: int, page: int) -> None:
        """Keep the rows of a page that others may find."""
        if owner in self._tails:
            self._due[page] = owner, index
            self._fill(owner)

    def page_offered(self, owner: int, index: int, page: int) -> bool:
        """False for a session that has yet to send a page's rows, if they are gone."""
        if owner not in self._tails or not self._lacks(owner, (index + 1) * self._page_size):
            return True
        if page in self._due:
            self._catch_up()
        return page in self._pages

    def page_taken(self, owner: int, index: int, page: int) -> None:
        """Hand a found page's rows to the session that found it."""
        if owner in self._tails and (rows := self._pages.pop(page, None)) is not None:
            self._pages[page] = rows
            self._taken(owner, index * self._page_size, rows)

    def page_dropped(self, page: int) -> None:
        """Let a page's rows go."""
        self._due.pop(page, None)
        rows = self._pages.pop(page, None)
        if rows is not None:
            self.bytes -= rows.nbytes

    def _fill(self, owner: int) -> None:
        """Keep the rows of a session's pages that have them all by now."""
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
