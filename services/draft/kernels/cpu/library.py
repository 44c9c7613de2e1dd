"""Registers the compiled kernels with XLA; they use as many threads as the process has cores."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

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


def int4_bytes(outputs: int, inputs: int) -> int:
    """Bytes of a packed int4 weight."""
    return int(_functions().outrider_draft_int4_bytes(outputs, inputs))


def pack_int4(rows: NDArray[np.uint16], to: NDArray[np.int8]) -> None:
    """Quantize and pack a weight. rows: [outputs, inputs], bits of bfloat16; to: its packed bytes."""
    threads = len(os.sched_getaffinity(0))
    _functions().outrider_draft_pack_int4(rows.ctypes.data, *rows.shape, to.ctypes.data, threads)


@functools.cache
def _functions() -> Any:
    library = build.KERNELS.loaded()
    library.outrider_draft_int4_bytes.argtypes = (ctypes.c_int64, ctypes.c_int64)
    library.outrider_draft_int4_bytes.restype = ctypes.c_int64
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.outrider_draft_pack_int4.argtypes = (pointer, size, size, pointer, ctypes.c_int32)
    library.outrider_draft_pack_int4.restype = None
    return library


def call(name: str, *results: jax.ShapeDtypeStruct, aliases: dict[int, int] | None = None) -> Callable[..., Any]:
    """A kernel as a function of arrays and attributes. aliases: by index, operands that results are written to."""
    shapes = results if len(results) > 1 else results[0]
    return jax.ffi.ffi_call(_PREFIX + name, shapes, input_output_aliases=aliases)
