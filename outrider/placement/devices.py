"""Memory and accelerators of this machine, found without PyTorch and JAX.

The standard library suffices, because the installation asks before it installs anything.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
GROUPS = (  # of control groups, versions 2 and 1: folder, and names of the limit and of the use
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_GPU = Path("/dev/nvidiactl")
_SECONDS = 20.0  # that the GPU's tool has to answer
_FIELDS = "index,uuid,name,memory.total,memory.reserved,memory.used,compute_cap,driver_version"
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _GOOGLE = "0x10de", "0x1ae0"  # makers of devices on the PCI bus
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # of GPUs, with and without a monitor
_TPU_DEVICES = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")  # TPU v2 to v7


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
    for folder, limit, used in GROUPS:
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


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU. index: among those that programs see.

    total: memory that programs can use, in bytes; used: by all programs now; both None where the driver shares the
        host's memory. capability: compute capability, such as (9, 0). driver: version of the driver
    """

    index: int
    name: str
    total: int | None
    used: int | None
    capability: tuple[int, int]
    driver: str

    @property
    def driver_branch(self) -> int:
        """The first number of the driver's version, which decides on the CUDA releases that it runs."""
        first = self.driver.partition(".")[0]
        return int(first) if first.isdigit() else 0


def gpus(*, hidden: bool = False) -> list[Gpu]:
    """The GPUs that this process sees, as the driver's tool reports them. hidden: those of the whole machine."""
    if not _GPU.exists() or not (hidden or has_gpu()):
        return []
    visible = None if hidden else os.environ.get("CUDA_VISIBLE_DEVICES")
    return parse_gpus(_smi() or "", visible)


def gpu_memory(index: int = 0) -> int | None:
    """Memory of a GPU in bytes, as the driver's tool reports it; None without one.

    index: among those that CUDA_VISIBLE_DEVICES leaves
    """
    found = gpus()
    return found[index].total if index < len(found) else None


def parse_gpus(answer: str, visible: str | None = None) -> list[Gpu]:
    """The GPUs in an answer of nvidia-smi. visible: CUDA_VISIBLE_DEVICES, numbers or UUIDs; None for all.

    As in CUDA, the list ends before the first entry that names no GPU.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    rows = [row for row in rows if len(row) == len(_FIELDS.split(","))]
    if visible is not None:
        chosen = []
        for name in map(str.strip, visible.split(",")):
            row = next((row for row in rows if name and (row[0] == name or row[1].startswith(name))), None)
            if row is None:
                break
            chosen.append(row)
        rows = chosen
    return [_gpu(i, row) for i, row in enumerate(rows)]


def _gpu(index: int, row: list[str]) -> Gpu:
    _, _, name, total, reserved, used, capability, driver = row
    major, _, minor = capability.partition(".")
    usable = int(total) - (int(reserved) if reserved.isdigit() else 0) if total.isdigit() else None
    return Gpu(
        index,
        name,
        None if usable is None else usable << 20,
        int(used) << 20 if used.isdigit() else None,
        (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0),
        driver,
    )


@functools.cache
def _smi() -> str | None:
    """The answer of nvidia-smi about all GPUs; None without one. Asked once, because it takes up to a second."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None


def nvidia_devices() -> int:
    """GPUs of NVIDIA on the PCI bus, with a driver or without."""
    return sum(maker == _NVIDIA and kind.startswith(_DISPLAY_CLASSES) for maker, _, kind in _pci_devices())


def tpu_chips() -> int:
    """TPU chips of this machine."""
    return sum(maker == _GOOGLE and device in _TPU_DEVICES for maker, device, _ in _pci_devices())


def _pci_devices() -> list[tuple[str, str, str]]:
    """Maker, device and class of everything on the PCI bus; empty where the bus is not shown."""
    found = []
    for folder in _PCI.glob("*"):
        try:
            words = [(folder / name).read_text(encoding="ascii").strip() for name in ("vendor", "device", "class")]
        except OSError:
            continue
        found.append((words[0], words[1], words[2]))
    return found
