"""Hidden states of the target as a drafter keeps them: the rows of one session, until they have been used.

positions   0 ........ first | first ............ end |
            used, or lost    | held, in one piece     | yet to come
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class FeatureRows:
    """A run of rows without a gap. Row j belongs to the token at position j."""

    def __init__(self) -> None:
        self.first = 0
        self._parts: list[NDArray[np.float32]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def end(self) -> int:
        """The position behind the last row that is held."""
        return self.first + self._count

    def add(self, first: int, rows: NDArray[np.float32]) -> None:
        """Rows from position `first` on, [n, width].

        Those that are held are left out. Rows that do not follow begin a run of their own: something was lost before
        them, or the target was asked to send everything again.
        """
        if first > self.end or first < self.first:
            self.first, self._parts, self._count = first, [], 0
        fresh = rows[self.end - first :]
        if len(fresh):
            self._parts.append(fresh)
            self._count += len(fresh)

    def take(self, count: int | None = None) -> NDArray[np.float32]:
        """The first rows, [n, width], all by default; they are held no longer."""
        whole = np.concatenate(self._parts) if self._parts else np.empty((0, 0), np.float32)
        taken, rest = whole[:count], whole[len(whole) if count is None else count :]
        self._parts = [rest] if len(rest) else []
        self.first += len(taken)
        self._count = len(rest)
        return taken
