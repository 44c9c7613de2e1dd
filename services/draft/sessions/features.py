"""Hidden states of the target, kept for a drafter: the received rows of one session, until they are used.

positions   0 ........ first | first ............ end |
            used             | held, contiguous       | not received

Rows are kept as received bytes. In bfloat16 they stay so until the device reads them.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.serving.features import FeatureFormat, decode


def dtype_of_rows(layout: FeatureFormat) -> Any:
    """The number format in which a drafter hands rows to its model: their own, if programs know it."""
    return ml_dtypes.bfloat16 if layout is FeatureFormat.BFLOAT16 else np.float32


def numbers_of(rows: NDArray[np.uint8], layout: FeatureFormat) -> NDArray[Any]:
    """The numbers of received rows, [n, row bytes] to [n, width], in the format of `dtype_of_rows`."""
    if layout is FeatureFormat.BFLOAT16:
        return np.ascontiguousarray(rows).view(ml_dtypes.bfloat16)
    return decode(rows, layout)


class FeatureRows:
    """Contiguous rows. Row j belongs to the token at position j.

    lost: rows are missing behind `end`; later rows are useless and are not kept
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
        """Bytes of a row; defined while rows are held."""
        return int(self._parts[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the held rows."""
        return self._count * self.width if self._parts else 0

    @property
    def end(self) -> int:
        """The position behind the last held row."""
        return self.first + self._count

    def add(self, first: int, rows: NDArray[np.uint8]) -> None:
        """Rows from position `first` on, [n, row bytes]. Rows that are held or used are skipped.

        Rows of another width than the held ones do not belong to this drafter; they count as missing.
        """
        if first > self.end or (self._parts and rows.shape[1] != self.width):
            self.lost = True
        fresh = rows[self.end - first :] if not self.lost else rows[:0]
        if len(fresh):
            self._parts.append(fresh.copy())  # a view would keep the received frame of all sessions in memory
            self._count += len(fresh)

    def take(self, count: int | None = None) -> NDArray[np.uint8]:
        """Take the first rows, [n, row bytes], all by default; they are no longer held."""
        if count == 0 or not self._parts:
            return np.empty((0, 0), np.uint8)
        whole = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        taken, rest = whole[:count], whole[len(whole) if count is None else count :]
        self._parts = [rest] if len(rest) else []
        self.first += len(taken)
        self._count = len(rest)
        return taken

    def give_up(self) -> None:
        """Rows that were used are needed again, but are no longer held."""
        self.lost = True
        self._parts, self._count = [], 0

    def skip(self, first: int) -> None:
        """Rows before a position are not needed, whether or not they were received."""
        if first <= self.first:
            return
        if first >= self.end:
            self.first, self._parts, self._count = first, [], 0
        else:
            self.take(first - self.first)
