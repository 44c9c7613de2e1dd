"""The project's compiled libraries for another processor, in an emulated process in the place of this one's."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider.native import Library, Signatures, vectors
from tests.support.emulated.machine import Machine

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_ROOT = "/usr/aarch64-linux-gnu"
"""Where the cross compiler has the C++ library and the dynamic loader."""
# Processors of the emulator. The first has just the instructions of the kind, so that others are noticed.
_PROCESSORS = {vectors.NEON: "neoverse-n1", vectors.NEON_BF16: "max,sve=off,sme=off,pauth=off"}
_PROGRAM = Path(__file__).with_name("machine.cpp")


def lacking() -> str | None:
    """Why nothing can be emulated on this machine; None if it can."""
    if os.uname().machine == "aarch64":
        return "this processor is one of ARM: its own kernels are tested"
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if not missing:
        return None
    return f"there is no {' and no '.join(missing)}; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user"


def operators(library: Library) -> Library:
    """The target's kernels but for programs, and less optimized: they are compiled in a third of the time."""
    return replace(
        library, name="outrider-operators", folder=_PROGRAM.with_name("operators"), flags=(*library.flags, "-O1"),
        includes=(library.folder, *library.includes),
    )  # fmt: skip


@functools.cache
def emulated(library: Library, kind: vectors.Kind) -> Machine:
    """A process with the library, compiled for a kind of ARM processor; compiles it if it has not been before."""
    folder = Path(sys.prefix) / "lib" / "outrider" / f"emulated-{kind.name}"
    folder.mkdir(parents=True, exist_ok=True)
    path, program = (
        folder / library._places()[0],
        folder / f"machine-{hashlib.sha256(_PROGRAM.read_bytes()).hexdigest()[:16]}",
    )
    if not path.exists():
        library.compile(COMPILER, path)
    if not program.exists():
        subprocess.run([COMPILER, "-std=c++17", "-O1", "-pthread", "-o", program, _PROGRAM, "-ldl"], check=True)
    return Machine((EMULATOR, "-L", _ROOT, "-cpu", _PROCESSORS[kind]), program, path)


def substitute(kind: vectors.Kind, *, whole: bool = True) -> None:
    """From now on libraries that this process loads are emulated ones of a kind. Before their modules are imported.

    whole: False for `operators` of the target's kernels
    """
    assert not any(name.startswith("services.") and name.endswith(".build") for name in sys.modules), "too late"

    def loaded(library: Library, prefix: str = "", signatures: Signatures = MappingProxyType({})) -> Any:
        machine = emulated(library if whole or not prefix else operators(library), kind)
        for name, (result, arguments) in signatures.items():
            if whole or not name.startswith("program_"):
                function = getattr(machine, prefix + name)
                function.restype, function.argtypes = result, arguments
        return machine

    vectors.chosen = lambda: kind  # type: ignore[assignment]
    vectors._check = lambda _: None
    Library.loaded = loaded  # type: ignore[assignment, method-assign]
