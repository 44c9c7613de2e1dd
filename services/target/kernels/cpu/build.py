"""What the kernels are compiled from, and with which flags."""

from __future__ import annotations

from pathlib import Path

from outrider.native import Library, vectors


def kernels(kind: vectors.Kind | None = None) -> Library:
    """As of vectors.library."""
    return vectors.library("outrider-kernels", Path(__file__).parent / "csrc", kind)


KERNELS = kernels()
