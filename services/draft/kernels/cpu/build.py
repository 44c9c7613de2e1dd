"""`python -m services.draft.kernels.cpu.build`: compiles the kernels, once an environment and source."""

from __future__ import annotations

from pathlib import Path

import jax.ffi

from outrider import native
from outrider.native import vectors

KERNELS = vectors.library(
    "outrider-draft", Path(__file__).parent / "csrc", ("-fvisibility=hidden",), (Path(jax.ffi.include_dir()),)
)

if __name__ == "__main__":
    native.report(KERNELS, "CPU kernels of the draft", "plain JAX")
