"""Headers that the CPU kernels of both services share, and what they ask of the processor.

memory.h pool.h            numbers on huge pages; threads and their barrier
simd.h softmax.h noise.h   vectors of 16 numbers, exp; sums of weights; coupled noise
weight.h operand.h         weights and rows of activations as products want them
pass.h dots.h matrix.h     a panel with some rows: by dot products of vectors, or on a matrix unit (AMX)
linear.h                   products of rows, each weight read once for all of them
keys.h eight.h             keys of a cache in columns; caches of 8 bits
"""

from __future__ import annotations

import platform
from pathlib import Path

from outrider.native import Unavailable

INCLUDE = Path(__file__).parent / "include"
# What the kernels are written in, by the names of /proc/cpuinfo.
_INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno",
    "-fno-tree-slp-vectorize", "-mtune=native", "-mavx2", "-mfma", "-mf16c",
    *("-m" + name.replace("_", "") for name in _INSTRUCTIONS),
)  # fmt: skip


def check_processor() -> None:
    """Raise Unavailable unless the processor has all the instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        raise Unavailable(f"they are written for Linux, and this is {platform.system()}") from None
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    if missing := [name for name in _INSTRUCTIONS if name not in has]:
        raise Unavailable(f"this processor lacks {', '.join(missing)}")
