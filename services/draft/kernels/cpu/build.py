"""`python -m services.draft.kernels.cpu.build`: compiles the kernels, once an environment and source."""

from __future__ import annotations

import sys
from pathlib import Path

import jax.ffi

from outrider import native
from outrider.native import vectors

KERNELS = native.Library(
    "outrider-draft",
    Path(__file__).parent / "csrc",
    (*vectors.FLAGS, "-fvisibility=hidden"),
    (vectors.INCLUDE, Path(jax.ffi.include_dir())),
)
Unavailable = native.Unavailable


def library() -> Path:
    """The compiled library, made if it is not there. Raises Unavailable, also where the processor could not run it."""
    vectors.check_processor()
    return KERNELS.compiled()


if __name__ == "__main__":
    try:
        sys.stdout.write(f"the draft's CPU kernels are compiled: {library()}\n")
    except Unavailable as reason:
        sys.stdout.write(f"no CPU kernels of the draft: {reason}. Plain JAX serves instead, more slowly.\n")
