"""CPU affinity and time slices of threads: compute threads keep their cores, network threads preempt them at once.

A thread that wakes on a busy core waits for the end of the running thread's time slice. That takes some milliseconds,
longer than a drafting step. A thread with a short time slice preempts the running one at once (Linux 6.12 and later).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable

_NETWORK_SLICE = 100_000  # nanoseconds: the shortest time slice that Linux grants
_DEFAULT_SLICE = 0  # the system's default
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # system call numbers of sched_setattr


class SchedAttributes(ctypes.Structure):
    """struct sched_attr of Linux, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def run_network_on(cores: Iterable[int] | None = None) -> None:
    """Give the calling thread, and the threads that it starts, short time slices for network work.

    cores: CPU cores they may run on; None keeps the affinity. On systems without time slices only the affinity changes.
    """
    if cores is not None:
        os.sched_setaffinity(0, cores)
    _set_slice(_NETWORK_SLICE)


def run_compute_on(cores: Iterable[int]) -> None:
    """Bind the calling thread, and the threads that it starts, to CPU cores, with default time slices."""
    os.sched_setaffinity(0, cores)
    _set_slice(_DEFAULT_SLICE)


def _set_slice(nanoseconds: int) -> None:
    call = _SET_ATTRIBUTES.get(platform.machine())
    if call is None or platform.system() != "Linux":
        return
    attributes = SchedAttributes(
        size=ctypes.sizeof(SchedAttributes), nice=os.getpriority(os.PRIO_PROCESS, 0), runtime=nanoseconds
    )
    ctypes.CDLL(None).syscall(call, 0, ctypes.byref(attributes), 0)
