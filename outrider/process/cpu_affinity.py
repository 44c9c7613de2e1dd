"""Where a process's threads run: those that compute on cores of their own, those that speak with others wherever one is
free, and at once.

A thread that wakes on a core where another one computes waits for the end of that one's slice, some milliseconds, which
is longer than a round of drafting. One that asks for short slices is let in at once (Linux 6.12 and later).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable

_SHORT = 100_000  # nanoseconds: the shortest slice that can be asked for
_USUAL = 0  # the system's
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # numbers of the system call sched_setattr


class _Attributes(ctypes.Structure):
    """struct sched_attr of Linux, in its first form."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def speak_from(cores: Iterable[int] | None = None) -> None:
    """The calling thread, and those that it starts, speak with others. cores: where they may run; None for no change.

    Where the system knows no slices, or grants none, they are as others are.
    """
    if cores is not None:
        os.sched_setaffinity(0, cores)
    _ask_for_slices(_SHORT)


def compute_on(cores: Iterable[int]) -> None:
    """The calling thread, and those that it starts, compute on these cores."""
    os.sched_setaffinity(0, cores)
    _ask_for_slices(_USUAL)


def _ask_for_slices(nanoseconds: int) -> None:
    call = _SET_ATTRIBUTES.get(platform.machine())
    if call is None or platform.system() != "Linux":
        return
    attributes = _Attributes(
        size=ctypes.sizeof(_Attributes), nice=os.getpriority(os.PRIO_PROCESS, 0), runtime=nanoseconds
    )
    ctypes.CDLL(None).syscall(call, 0, ctypes.byref(attributes), 0)
