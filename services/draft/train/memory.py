"""Memory allocation of the training process.

A training step allocates and frees arrays of tens of megabytes. By default the C library returns them to the system at
once and requests them again; clearing and mapping their pages takes a quarter of a step's time. Here freed memory is
kept and reused.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

# Of mallopt(3), GNU C library.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep freed memory in one heap that all threads share. Does nothing where the C library has no mallopt."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    settings = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: 1 << 28}
    accepted = [mallopt(name, value) for name, value in settings.items()]
    if not all(accepted):
        log.debug("the C library refused to keep freed memory")
