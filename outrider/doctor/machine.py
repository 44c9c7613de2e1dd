"""What the machine has: GPUs, TPUs, processor, memory, disk, Docker."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.checkpoints.conversion import cache_folder
from outrider.config import format_cores
from outrider.doctor.findings import Finding, note, ok, problem
from outrider.native import vectors
from outrider.placement.accelerators import CUDA12_DRIVER, CUDA13_DRIVER
from outrider.placement.devices import Gpu, free_host_memory, gpus, has_gpu, host_memory, nvidia_devices, tpu_chips
from outrider.placement.memory import GIB

TOPIC = "machine"
_CPUINFO = Path("/proc/cpuinfo")
_LOW_MEMORY, _LOW_DISK = 2 * GIB, 2 * GIB  # what the default model needs, with its converted weights
_LEAST_CAPABILITY = (8, 0)  # of bfloat16 and of the draft's Pallas kernels
_DOCKER_SECONDS = 10.0
# By implementer and part number, the cores of servers.
_ARM_CORES = {
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0x41", "0xd84"): "Neoverse V3",
    ("0x41", "0xd8e"): "Neoverse N3",
    ("0xc0", "0xac3"): "AmpereOne",
}


def findings(found: Sequence[Gpu]) -> Iterator[Finding]:
    """Everything about the machine. found: the GPUs that programs see."""
    known = gpus(hidden=True)
    yield from accelerators(found, known, on_bus=nvidia_devices(), tpus=tpu_chips(), driver=has_gpu())
    yield _processor()
    yield _memory()
    yield disk(cache_folder())
    yield docker(bool(found))


def accelerators(
    found: Sequence[Gpu], hidden: Sequence[Gpu], *, on_bus: int = 0, tpus: int = 0, driver: bool = False
) -> Iterator[Finding]:
    """GPUs and TPUs. hidden: all GPUs, also those that CUDA_VISIBLE_DEVICES hides.

    on_bus: NVIDIA GPUs on the PCI bus. driver: a driver is loaded, whether its tool answers or not
    """
    for gpu in found:
        yield _gpu(gpu)
    if len(hidden) > len(found):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        yield note(
            TOPIC, "GPUs", f'CUDA_VISIBLE_DEVICES is "{visible}", which leaves {len(found)} of {len(hidden)} GPUs',
            "unset it to use all of them",
        )  # fmt: skip
    if driver and not hidden:
        yield note(
            TOPIC, "GPUs", "a driver is loaded, but nvidia-smi does not answer: `serve` does not know the GPU's memory "
            "beforehand, and plans no share for a draft", "install nvidia-smi; in a container, allow its utilities",
        )  # fmt: skip
    elif on_bus and not hidden:
        yield problem(
            TOPIC, "GPUs", f"{on_bus} NVIDIA GPU{'s' if on_bus > 1 else ''} on the PCI bus, but no driver that answers "
            "(/dev/nvidiactl, nvidia-smi)",
            f"install NVIDIA's driver, version {CUDA13_DRIVER} or later; in a container, start it with --gpus all",
        )  # fmt: skip
    elif not hidden:
        yield ok(TOPIC, "GPUs", "none of NVIDIA")
    if tpus:
        yield ok(TOPIC, "TPUs", f"{tpus} chip{'s' if tpus > 1 else ''}")


def _gpu(gpu: Gpu) -> Finding:
    name, (major, minor) = f"GPU {gpu.index}", gpu.capability
    size = "memory shared with the host"
    if gpu.total is not None:
        used = f", {gpu.used / GIB:.1f} used now" if gpu.used and gpu.used >= GIB else ""
        size = f"{gpu.total / GIB:.1f} GiB{used}"
    text = f"{gpu.name}, {size}, compute capability {major}.{minor}, driver {gpu.driver}"
    if gpu.driver_branch < CUDA12_DRIVER:
        return problem(
            TOPIC, name, f"{text}, which runs neither CUDA 12 nor 13",
            f"install driver {CUDA13_DRIVER} or later, then make -B install",
        )  # fmt: skip
    if gpu.capability < _LEAST_CAPABILITY:
        return note(TOPIC, name, f"{text}: no fast bfloat16, and plain kernels for the draft", "pass --dtype float16")
    return ok(TOPIC, name, text)


def _processor() -> Finding:
    text = _CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.exists() else ""
    cores = format_cores(sorted(os.sched_getaffinity(0)))
    return processor(processor_name(text), cores, vectors.instruction_sets(text))


def processor_name(cpuinfo: str) -> str:
    """The processor's name; on ARM, where /proc/cpuinfo has numbers instead, that of its cores if it is known."""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.+)$", cpuinfo, re.MULTILINE))
    part = (fields.get("CPU implementer", ""), fields.get("CPU part", ""))
    return fields.get("model name") or _ARM_CORES.get(part) or platform.machine()


def processor(model: str, cores: str, flags: Sequence[str]) -> Finding:
    """The CPU. flags: its instruction sets, as in /proc/cpuinfo."""
    has = set(flags)
    if "asimd" in has:
        return _arm_processor(f"{model}, cores {cores}", has)
    sets = [name for name, needed in (("AVX2", vectors.AVX2), ("AVX-512", vectors.AVX512)) if not needed.lacking(has)]
    if sets[-1:] != ["AVX-512"] and "avx512f" in has:
        sets.append(f"AVX-512 without {', '.join(vectors.AVX512.lacking(has))}, which is not used")
    if "amx_tile" in has:
        kinds = [name for name in ("bf16", "int8", "fp16") if f"amx_{name}" in has]
        sets.append(f"AMX ({', '.join(kinds)})")
    text = f"{model}, cores {cores}; {', '.join(sets) or 'no AVX2'}"
    if "AVX2" in sets:
        return ok(TOPIC, "CPU", text)
    return note(TOPIC, "CPU", f"{text}: compiled kernels need AVX2, so PyTorch and XLA compute instead, more slowly")


def _arm_processor(text: str, has: set[str]) -> Finding:
    if "asimddp" not in has:
        return note(
            TOPIC, "CPU", f"{text}; NEON without dot products: compiled kernels need them (asimddp), so PyTorch "
            "and XLA compute instead, more slowly"
        )  # fmt: skip
    found = ["dot products", *(name for name in ("i8mm", "bf16") if name in has)]
    text = f"{text}; NEON with {', '.join(found)}"
    if found[1:] and vectors.NEON_BF16.lacking(has):
        text += f", which is not used without {', '.join(vectors.NEON_BF16.lacking(has))}"
    return ok(TOPIC, "CPU", f"{text}; these kernels are tested under an emulator, and their speed is not measured")


def _memory() -> Finding:
    free, total = free_host_memory(), host_memory()
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < _LOW_MEMORY:
        return note(TOPIC, "memory", f"{text}; the default model needs {_LOW_MEMORY / GIB:.0f}", "end other programs")
    return ok(TOPIC, "memory", text)


def disk(folder: Path) -> Finding:
    """Whether a folder for converted models has room."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / GIB:.1f} GiB free for converted models in {folder} (OUTRIDER_CACHE)"
    if not os.access(existing, os.W_OK):
        return problem(
            TOPIC, "disk", f"{folder} cannot be written", "set OUTRIDER_CACHE to a folder that this user can write"
        )
    if free < _LOW_DISK:
        return note(TOPIC, "disk", text, "free some of it, or set OUTRIDER_CACHE to a folder on another disk")
    return ok(TOPIC, "disk", text)


def docker(has_gpu: bool) -> Finding:
    """Docker, which only `docker compose up` needs, and its access to GPUs. has_gpu: the machine has one."""
    tool = shutil.which("docker")
    if tool is None:
        return ok(TOPIC, "Docker", "not installed; only `docker compose up` needs it")
    question = "{{.ServerVersion}} {{range $name, $_ := .Runtimes}}{{$name}} {{end}}"
    try:
        answer = subprocess.run(
            [tool, "info", "--format", question], capture_output=True, text=True, timeout=_DOCKER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return note(TOPIC, "Docker", f"no answer within {_DOCKER_SECONDS:.0f} s", "start Docker's daemon")
    words = answer.stdout.split()
    if answer.returncode or not words:
        return note(TOPIC, "Docker", "installed, but its daemon does not answer this user", "start Docker's daemon")
    if has_gpu and "nvidia" not in words[1:]:
        return note(
            TOPIC, "Docker", f"{words[0]}, without NVIDIA's runtime: containers see no GPU",
            "install the NVIDIA container toolkit for `docker compose up gateway-gpu`",
        )  # fmt: skip
    return ok(TOPIC, "Docker", words[0] + (", with NVIDIA's runtime" if "nvidia" in words[1:] else ""))
