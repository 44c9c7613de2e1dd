"""Keys of the coupled sampling noise at the positions of one session."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.noise import position_keys

_BLOCK = 64  # positions whose keys are derived together


class NoiseKeys:
    """Noise keys by position, derived in blocks."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._keys = np.empty((0, 2), dtype=np.uint32)
        self._pairs: list[list[int]] = []  # the same keys
        self._first = 0

    def __call__(self, positions: NDArray[np.integer]) -> NDArray[np.uint32]:
        """The keys of positions that lie close together. positions: [n]. Returns [n, 2] uint32."""
        self._derive(int(positions.min()), int(positions.max()))
        keys: NDArray[np.uint32] = self._keys[positions - self._first]
        return keys

    def at(self, position: int) -> list[int]:
        """The two words of a position's key."""
        self._derive(position, position)
        return self._pairs[position - self._first]

    def _derive(self, first: int, last: int) -> None:
        if self._first <= first and last < self._first + len(self._pairs):
            return
        self._first = first
        self._keys = position_keys(self._seed, np.arange(first, max(last + 1, first + _BLOCK)))
        self._pairs = self._keys.tolist()
