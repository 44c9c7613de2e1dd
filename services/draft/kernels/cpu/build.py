"""`python -m services.draft.kernels.cpu.build`: compiles the kernels, once an environment and source.

For this processor; kinds can be named instead (`avx2 avx512`), for images that other machines run.
"""

from __future__ import annotations

from pathlib import Path

import jax.ffi

from outrider.native import Library, vectors


def kernels(kind: vectors.Kind | None = None) -> Library:
    """As of vectors.library."""
    xla = Path(jax.ffi.include_dir())
    return vectors.library("outrider-draft", Path(__file__).parent / "csrc", kind, ("-fvisibility=hidden",), (xla,))


KERNELS = kernels()

if __name__ == "__main__":
    vectors.report(kernels, "CPU kernels of the draft", "plain JAX")
