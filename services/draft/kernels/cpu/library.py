"""Registers the compiled kernels with XLA; they use as many threads as the process has cores."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

from outrider import native
from services.draft.kernels.cpu import build

Unavailable = native.Unavailable

# Names that are registered with XLA, without the prefix.
_KERNELS = ("product", "attention", "keep", "candidates")
_PREFIX = "outrider_draft_"


@functools.cache
def load() -> None:
    """Compile and register the kernels, at the first call. Raises Unavailable."""
    library = build.KERNELS.loaded()
    for name in _KERNELS:
        kernel = jax.ffi.pycapsule(getattr(library, _PREFIX + name))
        jax.ffi.register_ffi_target(_PREFIX + name, kernel, platform="cpu")
    library.outrider_draft_threads(len(os.sched_getaffinity(0)))


def available() -> bool:
    """True if the kernels are available on this machine."""
    try:
        load()
    except Unavailable:
        return False
    return True


def call(name: str, *results: jax.ShapeDtypeStruct, aliases: dict[int, int] | None = None) -> Callable[..., Any]:
    """A kernel as a function of arrays and attributes. aliases: by index, operands that results are written to."""
    shapes = results if len(results) > 1 else results[0]
    return jax.ffi.ffi_call(_PREFIX + name, shapes, input_output_aliases=aliases)
