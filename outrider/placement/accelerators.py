"""Packages for the accelerators of this machine: JAX's plugin, and the build of PyTorch.

`python -m outrider.placement.accelerators WORD` prints

    explain        what is chosen, and why
    extras         the project's extras, each behind a comma
    torch-build    the build of PyTorch that pip's own index lacks, such as cu126; nothing if any will do
    env            lines for .env, by which compose builds images for this machine

`make install` asks before anything is installed, so this module imports the standard library alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from outrider.placement.devices import Gpu, gpus, nvidia_devices, tpu_chips

Accelerator = Literal["cpu", "cuda12", "cuda13", "tpu"]

# Oldest branches of NVIDIA's driver that run programs of CUDA 12 and 13.
CUDA12_DRIVER, CUDA13_DRIVER = 525, 580
# CUDA 13 has no kernels for older GPUs, and CUDA 12.6 none for Blackwell and later ones.
_CUDA13_CAPABILITY, _BLACKWELL = (7, 5), (10, 0)
# PyPI has PyTorch for CUDA 13; its other builds have package indexes of their own.
EXTRAS: dict[Accelerator, tuple[str, ...]] = {
    "cpu": (),
    "cuda12": ("draft-cuda12", "target-cuda12"),
    "cuda13": ("draft-cuda13", "target-cuda13"),
    "tpu": ("draft-tpu",),
}


@dataclass(frozen=True)
class Choice:
    """What to install. reason: one sentence. torch_build: of PyTorch; None for that of pip's own index."""

    accelerator: Accelerator
    reason: str
    torch_build: str | None = None

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the project."""
        return EXTRAS[self.accelerator]


def choose(found: Sequence[Gpu], tpus: int = 0, *, bare_gpus: int = 0) -> Choice:
    """The packages for a machine. found: its GPUs. tpus: its TPU chips. bare_gpus: NVIDIA GPUs on its PCI bus."""
    if not found:
        if tpus:
            return Choice("tpu", f"{tpus} TPU chips: the draft service (JAX) uses them, the target the CPU")
        if bare_gpus:
            return Choice(
                "cpu", f"NVIDIA GPUs without a driver that works ({bare_gpus} on the PCI bus): as without GPUs"
            )
        return Choice("cpu", "neither NVIDIA GPU nor TPU")
    oldest = min(found, key=lambda gpu: gpu.driver_branch)
    what = f"{', '.join(dict.fromkeys(gpu.name for gpu in found))}, driver {oldest.driver}"
    if oldest.driver_branch < CUDA12_DRIVER:
        return Choice("cpu", f"{what}: a driver before {CUDA12_DRIVER} runs neither CUDA 12 nor 13, so as without GPUs")
    least, most = min(gpu.capability for gpu in found), max(gpu.capability for gpu in found)
    if oldest.driver_branch >= CUDA13_DRIVER and least >= _CUDA13_CAPABILITY:
        return Choice("cuda13", f"{what}: CUDA 13")
    old_driver = oldest.driver_branch < CUDA13_DRIVER
    why = f"CUDA 13 needs driver {CUDA13_DRIVER}" if old_driver else "CUDA 13 needs compute capability 7.5"
    return Choice("cuda12", f"{what}: CUDA 12, because {why}", _cuda12_build(most))


def named(accelerator: Accelerator, found: Sequence[Gpu]) -> Choice:
    """The packages for an accelerator that the user names, for another machine or against the choice."""
    most = max((gpu.capability for gpu in found), default=(0, 0))
    return Choice(accelerator, "named by ACCELERATOR", _cuda12_build(most) if accelerator == "cuda12" else None)


def choose_here() -> Choice:
    """The packages for this machine, also for devices that CUDA_VISIBLE_DEVICES hides."""
    return choose(gpus(hidden=True), tpu_chips(), bare_gpus=nvidia_devices())


def _cuda12_build(capability: tuple[int, int]) -> str:
    return "cu128" if capability >= _BLACKWELL else "cu126"


def explanation(choice: Choice) -> str:
    """What is installed and why, for a person."""
    wanted = {
        "cpu": "no packages for accelerators",
        "tpu": "JAX's TPU library",
        "cuda12": "JAX's plugin for CUDA 12, torchao, PyTorch for CUDA 12",
        "cuda13": "JAX's plugin for CUDA 13, torchao, PyTorch for CUDA 13",
    }[choice.accelerator]
    build = f" (build {choice.torch_build})" if choice.torch_build else ""
    return f"accelerators: {choice.reason}; {wanted}{build}"


def environment(choice: Choice) -> str:
    """Lines for .env, by which compose builds the images of this machine's services."""
    if choice.accelerator == "cpu":
        return f"# {choice.reason}: the defaults of .env.example suit"
    if choice.accelerator == "tpu":
        return "ACCELERATOR=tpu"
    build = (
        f"# the address of the package index of PyTorch's build {choice.torch_build}:\n" if choice.torch_build else ""
    )
    return f"ACCELERATOR_GPU={choice.accelerator}\n{build}TORCH_INDEX_GPU="


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is asked for. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m outrider.placement.accelerators")
    parser.add_argument("what", choices=("explain", "extras", "torch-build", "env"))
    parser.add_argument("--accelerator", default="auto", choices=("auto", *get_args(Accelerator)))
    args = parser.parse_args(argv)
    chosen = choose_here() if args.accelerator == "auto" else named(args.accelerator, gpus(hidden=True))
    words = {
        "explain": explanation(chosen),
        "extras": "".join(f",{name}" for name in chosen.extras),
        "torch-build": chosen.torch_build or "",
        "env": environment(chosen),
    }
    sys.stdout.write(words[args.what] + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
