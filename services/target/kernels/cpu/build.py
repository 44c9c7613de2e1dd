"""`python -m services.target.kernels.cpu.build`: compiles the kernels, once an environment and source.

For this processor; kinds can be named instead (`avx2 avx512`), for images that other machines run.
"""

from __future__ import annotations

from pathlib import Path

from outrider.native import Library, vectors


def kernels(kind: vectors.Kind | None = None) -> Library:
    """As of vectors.library."""
    return vectors.library("outrider-kernels", Path(__file__).parent / "csrc", kind)


KERNELS = kernels()

if __name__ == "__main__":
    vectors.report(kernels, "CPU kernels of the target", "PyTorch")
