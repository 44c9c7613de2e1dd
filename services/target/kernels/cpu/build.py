"""`python -m services.target.kernels.cpu.build`: compiles the kernels, once an environment and source."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from outrider import native

# What the kernels are written in, by the names of /proc/cpuinfo.
_INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno",
    "-fno-tree-slp-vectorize", "-mtune=native", "-mavx2", "-mfma", "-mf16c",
    *("-m" + name.replace("_", "") for name in _INSTRUCTIONS),
)  # fmt: skip
KERNELS = native.Library("outrider-kernels", Path(__file__).parent / "csrc", _FLAGS)
Unavailable = native.Unavailable


def library() -> Path:
    """The compiled library, made if it is not there. Raises Unavailable, also where the processor could not run it."""
    _check_processor()
    return KERNELS.compiled()


def _check_processor() -> None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        raise Unavailable(f"they are written for Linux, and this is {platform.system()}") from None
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    if missing := [name for name in _INSTRUCTIONS if name not in has]:
        raise Unavailable(f"this processor lacks {', '.join(missing)}")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"the CPU kernels are compiled: {KERNELS.compiled()}\n")
    except Unavailable as reason:
        sys.stdout.write(f"no CPU kernels: {reason}. PyTorch's own operators serve instead, more slowly.\n")
