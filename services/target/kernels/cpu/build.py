"""The sources and flags of the compiled kernels."""

from __future__ import annotations

from pathlib import Path

from outrider.native import Library, vectors


def kernels(kind: vectors.Kind | None = None) -> Library:
    """The kernels as a library. kind: as in vectors.library."""
    return vectors.library("outrider-kernels", Path(__file__).parent / "csrc", kind)


KERNELS = kernels()
