"""Measurement of memory read bandwidth, which bounds the time of every step from below."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from services.target.kernels.cpu import library
from services.target.kernels.cpu.pool import Pool

_BYTES = 512 << 20  # more than any cache
_TRIES = 5


class Reader:
    """Threads that read memory on request."""

    def __init__(self, threads: int) -> None:
        self._memory = np.ones(_BYTES, np.uint8)
        self._pool = Pool(threads)
        self._clock = library.Clock(time.perf_counter)
        self._next = 0  # end of the last reading; memory from here on is not in the caches

    def bandwidth(self, size: int = _BYTES) -> float:
        """Bytes per second of all threads while they read `size` bytes, at most _BYTES."""
        begin = self._next if self._next + size <= _BYTES else 0
        self._next = begin + size
        place = ctypes.cast(self._memory.ctypes.data + begin, ctypes.c_char_p)
        return float(library.load().outrider_read_bandwidth(self._pool.handle, place, size, self._clock))


def read_bandwidth(threads: int) -> float:
    """Bytes per second that a number of threads read together; the best of several tries."""
    reader = Reader(threads)
    return max(reader.bandwidth() for _ in range(_TRIES))
