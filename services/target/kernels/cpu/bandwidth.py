"""How fast memory can be read: the floor under every step."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from services.target.kernels.cpu import library
from services.target.kernels.cpu.pool import Pool

_BYTES = 512 << 20  # more than any cache
_TRIES = 5


def read_bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read together, at best of a few tries."""
    memory = np.ones(_BYTES, np.uint8)
    pool = Pool(threads)
    clock = library.Clock(time.perf_counter)
    return max(
        library.load().outrider_read_bandwidth(pool.handle, memory.ctypes.data_as(ctypes.c_char_p), _BYTES, clock)
        for _ in range(_TRIES)
    )
