"""How fast memory can be read: the floor under every step."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from services.target.kernels.cpu import library
from services.target.kernels.cpu.pool import Pool

_BYTES = 512 << 20  # more than any cache
_TRIES = 5


class Reader:
    """Threads that read memory, as often as they are asked."""

    def __init__(self, threads: int) -> None:
        self._memory = np.ones(_BYTES, np.uint8)
        self._pool = Pool(threads)
        self._clock = library.Clock(time.perf_counter)
        self._next = 0  # where the last reading ended: what lies there has left the caches

    def bandwidth(self, size: int = _BYTES) -> float:
        """Bytes a second of reading so many bytes, _BYTES at most, together."""
        begin = self._next if self._next + size <= _BYTES else 0
        self._next = begin + size
        place = ctypes.cast(self._memory.ctypes.data + begin, ctypes.c_char_p)
        return float(library.load().outrider_read_bandwidth(self._pool.handle, place, size, self._clock))


def read_bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read together, at best of a few tries."""
    reader = Reader(threads)
    return max(reader.bandwidth() for _ in range(_TRIES))
