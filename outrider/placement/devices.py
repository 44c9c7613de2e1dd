"""Memory of this machine and of its GPUs, found without PyTorch and JAX."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GPU = Path("/dev/nvidiactl")
_SECONDS = 20.0  # that the GPU's tool has to answer


def free_host_memory() -> int:
    """Memory of the machine that no process uses, in bytes; the kernel's file caches count as free."""
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
