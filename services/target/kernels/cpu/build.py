"""`python -m services.target.kernels.cpu.build`: compiles the kernels, once an environment and source."""

from __future__ import annotations

from pathlib import Path

from outrider import native
from outrider.native import vectors

KERNELS = vectors.library("outrider-kernels", Path(__file__).parent / "csrc")

if __name__ == "__main__":
    native.report(KERNELS, "CPU kernels of the target", "PyTorch")
