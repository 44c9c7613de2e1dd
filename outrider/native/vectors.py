"""Headers that the CPU kernels of both services share, and the processor instructions that they need.

processor.h                          prefetches, conversions of half-precision numbers
memory.h                             aligned memory on huge pages
spin_wait.h pool.h                   waiting for another thread; a thread pool and its barrier
lanes.h                              vectors of 16 numbers, for each instruction set
simd.h softmax.h noise.h             functions of vectors; softmax sums; coupled noise
format.h weight.h block_rows.h       number formats of weights; packed weights; rows of block formats
operand.h operand_format.h           rows of activations
panel_pass.h dots.h matrix.h         products of a panel with some rows, by vectors or on a matrix unit (AMX)
block_pass.h block_dots.h            the same for block formats; one file of a library includes multiply_blocks.h
float8_pass.h float8_dots.h          the same for 8-bit floats (FP8 checkpoints)
float8_lines.h widened.h             and for many rows, by way of bfloat16
linear.h                             products of rows, which read each weight once for all rows
kv_dot.h kv_dot_bf16.h fp8.h         dot products with numbers of a KV cache; its FP8 formats

Headers that depend on the instruction set are in avx512/, avx2/ and neon/, under the same names; x86/ has what the
first two share.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from outrider import native
from outrider.errors import ConfigError
from outrider.native import Library, Unavailable

_INCLUDE = Path(__file__).parent / "include"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fno-tree-slp-vectorize")


@dataclass(frozen=True)
class Family:
    """Processors of one architecture. machine: its name in `uname`; folder: of headers that its kinds share, if any."""

    machine: str
    folder: str | None

    @property
    def here(self) -> bool:
        """True on a processor of this family."""
        return platform.machine() == self.machine


_X86 = Family("x86_64", "x86")
_ARM = Family("aarch64", None)


@dataclass(frozen=True)
class Kind:
    """A kind of processor. instructions: required instruction sets, by their names in /proc/cpuinfo.

    folder: of its headers; options: compiler flags that select the instructions
    """

    name: str
    family: Family
    folder: str
    instructions: tuple[str, ...]
    options: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """For the compiler; for other families' processors a cross compiler."""
        return (*_FLAGS, *self.options, *(("-mtune=native",) if self.family.here else ()))

    @property
    def includes(self) -> tuple[Path, ...]:
        """Folders of headers."""
        shared = () if self.family.folder is None else (_INCLUDE / self.family.folder,)
        return _INCLUDE, *shared, _INCLUDE / self.folder

    def missing(self) -> tuple[str, ...]:
        """The instruction sets that this processor lacks."""
        return self.lacking(_processor())

    def lacking(self, processor: Collection[str]) -> tuple[str, ...]:
        """The instruction sets that a processor lacks. processor: those that it has."""
        return tuple(name for name in self.instructions if name not in processor)


def _x86(name: str, *instructions: str) -> Kind:
    return Kind(name, _X86, name, instructions, tuple("-m" + name.replace("_", "") for name in instructions))


def _arm(name: str, extensions: str, *instructions: str) -> Kind:
    # Compilers may fuse a product and a sum into one rounding; whether they do may differ between copies of a function.
    return Kind(name, _ARM, "neon", instructions, (f"-march=armv8.2-a{extensions}", "-ffp-contract=off"))


_PLAIN = ("avx2", "fma", "f16c")
AVX2 = _x86("avx2", *_PLAIN)
AVX512 = _x86("avx512", *_PLAIN, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
NEON = _arm("neon", "+dotprod", "asimd", "asimddp")
NEON_BF16 = _arm("neon_bf16", "+dotprod+i8mm+bf16", "asimd", "asimddp", "i8mm", "bf16")
KINDS = {kind.name: kind for kind in (AVX2, AVX512, NEON, NEON_BF16)}  # of a family the better ones last
ALL = "all"
"""Names all kinds of this machine's family on a command line."""

VARIABLE = "OUTRIDER_VECTORS"
"""Environment variable with the name of a kind, which overrides the best one for this processor."""


def library(
    name: str, folder: Path, kind: Kind | None = None, flags: tuple[str, ...] = (), includes: tuple[Path, ...] = ()
) -> Library:
    """The library of a folder's kernels. kind: for another machine; by default this processor, which must support it.

    flags, includes: in addition to those of the kind
    """
    own = kind or chosen()
    check = None if kind else functools.partial(_check, own)
    return Library(name, folder, (*own.flags, *flags), (*own.includes, *includes), check)


def report(library_of: Callable[[Kind | None], Library], what: str, instead: str) -> None:
    """Compile kernels and print the result, for this processor or for each kind on the command line.

    instead: their replacement where they are not available
    """
    names = sys.argv[1:]
    if names == [ALL]:
        names = [kind.name for kind in KINDS.values() if kind.family.here]
    if unknown := set(names) - set(KINDS):
        raise SystemExit(f"{', '.join(sorted(unknown))}: there are kernels for {_kinds()}; {ALL} is this machine's")
    kinds: list[Kind | None] = [KINDS[name] for name in names]
    try:
        for kind in kinds or [None]:
            native.report(library_of(kind), f"{what} ({(kind or chosen()).name})", instead)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


@functools.cache
def chosen() -> Kind:
    """The kind that this process uses: the one that the environment names, or the best one."""
    if (named := KINDS.get(os.environ.get(VARIABLE, ""))) is not None:
        return named
    family = [kind for kind in KINDS.values() if kind.family.here] or [AVX2]
    return next((kind for kind in reversed(family) if not kind.missing()), family[0])


def _kinds() -> str:
    *names, last = KINDS
    return f"{', '.join(names)} and {last}"


def _check(kind: Kind) -> None:
    """Raise Unavailable if the processor lacks instructions, or ConfigError if the environment names the kind."""
    named = os.environ.get(VARIABLE)
    if named and named not in KINDS:
        raise ConfigError(f"{VARIABLE} is {named}, but there are kernels for {_kinds()}; leave it out")
    if not _processor():
        raise Unavailable(f"they are written for x86 and ARM processors under Linux, and this is {platform.platform()}")
    if missing := kind.missing():
        if named:
            raise ConfigError(f"{VARIABLE} is {named}, but this processor lacks {', '.join(missing)}; leave it out")
        raise Unavailable(f"this processor lacks {', '.join(missing)}")


@functools.cache
def _processor() -> frozenset[str]:
    """The processor's instruction sets; empty if they are unknown."""
    try:
        return frozenset(instruction_sets(Path("/proc/cpuinfo").read_text()))
    except OSError:
        return frozenset()


def instruction_sets(cpuinfo: str) -> list[str]:
    """The instruction sets that /proc/cpuinfo lists, as flags on x86 and as features on ARM."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((names.split() for key, _, names in lines if key.strip() in ("flags", "Features")), [])
