"""Memory of this machine and of its GPUs, found without PyTorch and JAX."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
_GROUPS = (  # of control groups, versions 2 and 1: folder, and names of the limit and of the use
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_GPU = Path("/dev/nvidiactl")
_SECONDS = 20.0  # that the GPU's tool has to answer


def free_host_memory() -> int:
    """Memory that this process can still get, in bytes: of the machine, or of its container if that has less. The
    kernel's file caches count as free.
    """
    group = _memory_group()
    return _free_on_machine() if group is None else min(_free_on_machine(), max(group.limit - group.used, 0))


def host_memory() -> int:
    """Memory of the machine, or of the container of this process if that has less, in bytes."""
    total, group = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _memory_group()
    return total if group is None else min(total, group.limit)


class _MemoryGroup(NamedTuple):
    """The limit of a container, and what its processes use without file caches, in bytes."""

    limit: int
    used: int


def _memory_group() -> _MemoryGroup | None:
    """The memory of this process's container; None without a limit."""
    for folder, limit, used in _GROUPS:
        try:
            words = {name: (folder / name).read_text(encoding="ascii") for name in (limit, used, "memory.stat")}
            # In version 1, the "total" includes child groups.
            cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", words["memory.stat"], re.MULTILINE)
            return _MemoryGroup(int(words[limit]), int(words[used]) - max(map(int, cached), default=0))
        except (OSError, ValueError):  # another version of control groups, or "max"
            continue
    return None


def _free_on_machine() -> int:
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", _MEMINFO.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(found[1]) * 1024


def has_gpu() -> bool:
    """True if this process sees an NVIDIA GPU."""
    return _GPU.exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")


def gpu_memory(index: int = 0) -> int | None:
    """Total memory of a GPU in bytes, as the driver's tool reports it; None without one.

    index: among those that CUDA_VISIBLE_DEVICES leaves
    """
    tool = shutil.which("nvidia-smi")
    if tool is None or not has_gpu():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else []
    if names and index >= len(names):
        return None
    which = names[index] if names else str(index)
    command = [tool, f"--id={which}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout.strip()
    return int(text) << 20 if answer.returncode == 0 and text.isdigit() else None
