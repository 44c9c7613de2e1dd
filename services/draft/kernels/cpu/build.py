"""`python -m services.draft.kernels.cpu.build`: compiles the kernels, once an environment and source."""

from __future__ import annotations

from pathlib import Path

import jax.ffi

from outrider import native
from outrider.native import vectors

KERNELS = native.Library(
    "outrider-draft",
    Path(__file__).parent / "csrc",
    (*vectors.FLAGS, "-fvisibility=hidden"),
    (vectors.INCLUDE, Path(jax.ffi.include_dir())),
    vectors.check_processor,
)

if __name__ == "__main__":
    native.report(KERNELS, "CPU kernels of the draft", "plain JAX")
