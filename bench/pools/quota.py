"""A limit on the processor time of a process: a cgroup with a quota, so that a gateway saturates before the machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_PERIOD = 10_000  # microseconds in which a process may use its share
_numbers = itertools.count()


@contextlib.contextmanager
def limited(cores: float) -> Iterator[Callable[[int], None]]:
    """A function that limits processes, and those that they start, to a share of a core together; 0 for no limit.

    Raises OSError if no cgroup can be made.
    """
    if not cores:
        yield lambda pid: None  # noqa: ARG005
        return
    v1 = (_V1 / "cpu.cfs_quota_us").exists()
    group = (_V1 if v1 else _V2) / f"outrider-pools-{os.getpid()}-{next(_numbers)}"
    if not v1:
        (_V2 / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    quota = int(cores * _PERIOD)

    def limit(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))

    try:
        if v1:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
        yield limit
    finally:
        _remove(group)


def can_limit() -> bool:
    """True if this process may limit others."""
    try:
        with limited(1.0):
            return True
    except OSError:
        return False


def _remove(group: Path) -> None:
    for _ in range(100):  # the kernel may not have reaped the processes yet
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
