"""Headers that the CPU kernels of both services share, and what they ask of the processor.

memory.h                   numbers on huge pages
patience.h pool.h          waiting for another thread; threads and their barrier
lanes.h                    vectors of 16 numbers, for each kind of processor
simd.h softmax.h noise.h   functions of them, exp; sums of weights; coupled noise
weight.h operand.h rows.h  weights and rows of activations as products want them
pass.h dots.h matrix.h     a panel with some rows: by dot products of vectors, or on a matrix unit (AMX)
linear.h                   products of rows, each weight read once for all of them
keys.h pairs.h eight.h     numbers of a cache and how they are multiplied; caches of 8 bits

What depends on the kind of processor lies in avx512/ and avx2/, under the same names.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider import native
from outrider.errors import ConfigError
from outrider.native import Library, Unavailable

_INCLUDE = Path(__file__).parent / "include"
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fno-tree-slp-vectorize", "-mtune=native",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of processor. instructions: what kernels are written in, by the names of /proc/cpuinfo."""

    name: str  # of the folder of headers
    instructions: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """For the compiler."""
        return (*_FLAGS, *("-m" + name.replace("_", "") for name in self.instructions))

    @property
    def includes(self) -> tuple[Path, ...]:
        """Folders of headers."""
        return _INCLUDE, _INCLUDE / self.name

    def missing(self) -> tuple[str, ...]:
        """Of the instructions, those that this processor lacks."""
        return tuple(name for name in self.instructions if name not in _processor())


_PLAIN = ("avx2", "fma", "f16c")
AVX2 = Kind("avx2", _PLAIN)
AVX512 = Kind("avx512", (*_PLAIN, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"))
KINDS = {kind.name: kind for kind in (AVX2, AVX512)}

VARIABLE = "OUTRIDER_VECTORS"
"""Of the environment: the name of a kind, in the place of the best that this processor is of."""


def library(
    name: str, folder: Path, kind: Kind | None = None, flags: tuple[str, ...] = (), includes: tuple[Path, ...] = ()
) -> Library:
    """Kernels in a folder. kind: of another machine; by default for this processor, which must have what they ask for.

    flags, includes: beside those of the kind
    """
    own = kind or chosen()
    check = None if kind else functools.partial(_check, own)
    return Library(name, folder, (*own.flags, *flags), (*own.includes, *includes), check)


def report(library_of: Callable[[Kind | None], Library], what: str, instead: str) -> None:
    """Compile kernels, and print what came of it: for this processor, or for each kind that the command line names.

    instead: what serves where they cannot be had
    """
    names = sys.argv[1:]
    if unknown := set(names) - set(KINDS):
        raise SystemExit(f"{', '.join(sorted(unknown))}: there are kernels for {' and '.join(KINDS)}")
    kinds: list[Kind | None] = [KINDS[name] for name in names]
    try:
        for kind in kinds or [None]:
            native.report(library_of(kind), f"{what} ({(kind or chosen()).name})", instead)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


@functools.cache
def chosen() -> Kind:
    """What kernels of this process are compiled for: the kind that the environment names, or the best."""
    named = KINDS.get(os.environ.get(VARIABLE, ""))
    return named or (AVX2 if AVX512.missing() else AVX512)


def _check(kind: Kind) -> None:
    """Raise Unavailable unless the processor has all the instructions; ConfigError if somebody asked for them."""
    named = os.environ.get(VARIABLE)
    if named and named not in KINDS:
        raise ConfigError(f"{VARIABLE} is {named}, but there are kernels for {' and '.join(KINDS)}; leave it out")
    if not _processor():
        raise Unavailable(f"they are written for x86 processors under Linux, and this is {platform.platform()}")
    if missing := kind.missing():
        if named:
            raise ConfigError(f"{VARIABLE} is {named}, but this processor lacks {', '.join(missing)}; leave it out")
        raise Unavailable(f"this processor lacks {', '.join(missing)}")


@functools.cache
def _processor() -> frozenset[str]:
    """What the processor has; nothing where that cannot be known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
