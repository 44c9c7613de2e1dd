"""The kernel's out-of-memory killer, aimed at one process: a memory cgroup with that process and one that allocates."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness.errors import BenchError
from bench.harness.processes import running

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_LIMIT = 64 << 20  # bytes; what a process had before it moved here does not count
_SECONDS = 20.0  # for the kill
# Allocates until the process is gone.
_ALLOCATE = """
import os, sys, time
victim, held = int(sys.argv[1]), []
while os.path.exists(f"/proc/{victim}/exe"):
    try:
        os.readlink(f"/proc/{victim}/exe")
    except OSError:
        break
    held.append(bytearray(b"x" * (4 << 20)))
    time.sleep(0.02)
"""


@contextlib.contextmanager
def _group() -> Iterator[tuple[Path, str]]:
    """A memory cgroup for the duration of the context, and the name of its limit."""
    v1 = (_V1 / "memory.limit_in_bytes").exists()
    group = (_V1 if v1 else _V2) / f"outrider-chaos-{os.getpid()}"
    try:
        if not v1:
            (_V2 / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError as error:
        raise BenchError(f"no memory cgroup can be made: {error}") from None
    try:
        yield group, "memory.limit_in_bytes" if v1 else "memory.max"
    finally:
        # A process that survived, and what the kernel has not reaped yet, go back.
        for _ in range(100):
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    (group.parent / "cgroup.procs").write_text(pid)
                group.rmdir()
                break
            time.sleep(0.05)


def out_of_memory(pid: int) -> None:
    """Let the kernel kill a process for want of memory. Raises BenchError if it does not."""
    with _group() as (group, limit):
        (group / limit).write_text(str(_LIMIT))
        (group / "cgroup.procs").write_text(str(pid))
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")  # so that the kernel chooses it
        with running([sys.executable, "-c", _ALLOCATE, str(pid)], stdin=subprocess.DEVNULL) as hog:
            (group / "cgroup.procs").write_text(str(hog.pid))
            end = time.monotonic() + _SECONDS
            while Path(f"/proc/{pid}/exe").exists():
                if time.monotonic() > end:
                    raise BenchError("the kernel killed no process although its memory cgroup was full")
                time.sleep(0.02)
