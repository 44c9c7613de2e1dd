"""Sources and compiler flags of the kernels."""

from __future__ import annotations

from pathlib import Path

import jax.ffi

from outrider.native import Library, vectors


def kernels(kind: vectors.Kind | None = None) -> Library:
    """As of vectors.library."""
    xla = Path(jax.ffi.include_dir())
    return vectors.library("outrider-draft", Path(__file__).parent / "csrc", kind, ("-fvisibility=hidden",), (xla,))


KERNELS = kernels()
