"""Hidden states of the target as a drafter keeps them: the rows of one session, until they have been used.

positions   0 ........ first | first ............ end |
            used             | held, in one piece     | yet to come

Rows are kept as the bytes in which they came.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class FeatureRows:
    """A run of rows without a gap. Row j belongs to the token at position j.

    lost: rows are missing behind `end`; what comes after them is of no use, and is not kept
    """

    def __init__(self) -> None:
        self.first = 0
        self.lost = False
        self._parts: list[NDArray[np.uint8]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def width(self) -> int:
        """Bytes of a row, where rows are held."""
        return self._parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are held."""
        return self._count * self.width if self._parts else 0

    @property
    def end(self) -> int:
        """The position behind the last row that is held."""
        return self.first + self._count

    def add(self, first: int, rows: NDArray[np.uint8]) -> None:
        """Rows from position `first` on, [n, row bytes]. Those that are held or used are left out.

        Rows of another width than those that are held are no rows of this drafter's; they count as missing.
        """
        if first > self.end or (self._parts and rows.shape[1] != self.width):
            self.lost = True
        fresh = rows[self.end - first :] if not self.lost else rows[:0]
        if len(fresh):
            self._parts.append(fresh.copy())  # or each row would keep the frame that it came in, of all sessions
            self._count += len(fresh)

    def take(self, count: int | None = None) -> NDArray[np.uint8]:
        """The first rows, [n, row bytes], all by default; they are held no longer."""
        if count == 0 or not self._parts:
            return np.empty((0, 0), np.uint8)
        whole = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        taken, rest = whole[:count], whole[len(whole) if count is None else count :]
        self._parts = [rest] if len(rest) else []
        self.first += len(taken)
        self._count = len(rest)
        return taken

    def give_up(self) -> None:
        """Rows that were used are needed again, but they are gone."""
        self.lost = True
        self._parts, self._count = [], 0

    def skip(self, first: int) -> None:
        """Rows before a position are not needed; they need not have come."""
        if first <= self.first:
            return
        if first >= self.end:
            self.first, self._parts, self._count = first, [], 0
        else:
            self.take(first - self.first)
