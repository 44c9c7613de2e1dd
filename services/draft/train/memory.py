"""How the process gets its memory from the system.

A step makes and frees arrays of tens of megabytes. The C library gives such back to the system at once, and asks for
them again: each page of them is then cleared and mapped anew, a quarter of a step's time. Kept, they are reused.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

# Of mallopt(3), GNU C library.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep what is freed, from now on, in one heap that all threads share. Does nothing where there is no mallopt."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    wishes = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: 1 << 28}
    granted = [mallopt(name, value) for name, value in wishes.items()]
    if not all(granted):
        log.debug("the C library refused to keep freed memory")
