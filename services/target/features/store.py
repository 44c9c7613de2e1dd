"""Features of cached prefix pages, in host memory.

Cached tokens are not computed again, so without their features a drafter would have no context for exactly the prompts
that repeat. All sessions share pages, whatever features they want; the rows of a page are kept by specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]  # [rows, row bytes]
_Key = tuple[int, int]  # page, and id of a specification


@dataclass
class _Tail:
    """Rows of a session that may still become part of a cached page.

    spec: id of their specification; until: the position from which on none are kept; first: position of the first one,
    in tokens
    """

    spec: int
    until: int
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
    """A `PageObserver` that keeps rows by page and specification, up to a number of bytes, in LRU order.

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
        self._rows: dict[_Key, _Bytes] = {}  # in order of last use
        self._specs: dict[int, set[int]] = {}  # by page, the specifications of its rows, complete or not
        self._due: dict[_Key, tuple[int, int]] = {}  # pages whose rows are not complete: owner, and index in its table
        self._tails: dict[int, _Tail] = {}
        self.bytes = 0

    @property
    def pages(self) -> frozenset[int]:
        """The pages with rows."""
        return frozenset(page for page, _ in self._rows)

    @property
    def pending(self) -> frozenset[int]:
        """Cached pages whose rows are not complete."""
        return frozenset(page for page, _ in self._due)

    def open(self, session_id: int, spec: int, until: int) -> None:
        """Keep this session's rows. spec: id of their specification. until: the position from which on none come."""
        self._tails[session_id] = _Tail(spec, until)

    def close(self, session_id: int) -> None:
        """The session has given its pages back."""
        if self._tails.pop(session_id, None) is not None:
            for key in [key for key, due in self._due.items() if due[0] == session_id]:
                del self._due[key]
                self._tidy(key)

    def add(self, session_id: int, first: int, rows: _Bytes) -> None:
        """Add rows of committed tokens, as they were sent. first: position of the first one."""
        self._tails[session_id].add(first, rows)
        self._fill(session_id)

    def forget(self) -> None:
        """Drop all rows; open sessions continue with later rows."""
        self._rows.clear()
        self._due.clear()
        self._specs.clear()
        self.bytes = 0
        for session_id, tail in self._tails.items():
            self._tails[session_id] = _Tail(tail.spec, tail.until)

    # --- events of the prefix cache ---

    def page_cached(self, owner: int, index: int, page: int) -> None:
        """Keep the rows of a page that other sessions may find."""
        tail = self._tails.get(owner)
        if tail is not None and (index + 1) * self._page_size <= tail.until:
            self._specs.setdefault(page, set()).add(tail.spec)
            self._due[page, tail.spec] = owner, index
            self._fill(owner)

    def page_offered(self, owner: int, index: int, page: int) -> bool:
        """False if the session must still send the page's rows, and they were dropped."""
        tail = self._tails.get(owner)
        if tail is None or not self._lacks(owner, (index + 1) * self._page_size):
            return True
        if (page, tail.spec) in self._due:
            self._catch_up()
        return (page, tail.spec) in self._rows

    def page_taken(self, owner: int, index: int, page: int) -> None:
        """Send a found page's rows to the session that found it."""
        tail = self._tails.get(owner)
        if tail is not None and (rows := self._rows.pop((page, tail.spec), None)) is not None:
            self._rows[page, tail.spec] = rows
            self._taken(owner, index * self._page_size, rows)

    def page_dropped(self, page: int) -> None:
        """Drop a page's rows."""
        for spec in self._specs.pop(page, ()):
            self._due.pop((page, spec), None)
            self._drop((page, spec))

    def _fill(self, owner: int) -> None:
        """Keep the rows of a session's pages that are complete by now."""
        tail, size = self._tails[owner], self._page_size
        for key, index in [(key, index) for key, (whose, index) in self._due.items() if whose == owner]:
            if (index + 1) * size > tail.end:
                return
            del self._due[key]
            rows = tail.page(index * size, size)
            if rows is not None and key not in self._rows:
                self._keep(key, rows)
            self._tidy(key)

    def _keep(self, key: _Key, rows: _Bytes) -> None:
        self._rows[key] = rows
        self.bytes += rows.nbytes
        while self.bytes > self._limit:
            oldest = next(iter(self._rows))
            self._drop(oldest)
            self._tidy(oldest)

    def _drop(self, key: _Key) -> None:
        rows = self._rows.pop(key, None)
        self.bytes -= 0 if rows is None else rows.nbytes

    def _tidy(self, key: _Key) -> None:
        """Forget a page's specification if it has no rows of it and awaits none."""
        page, spec = key
        if key in self._rows or key in self._due or page not in self._specs:
            return
        self._specs[page].discard(spec)
        if not self._specs[page]:
            del self._specs[page]
