"""Reads float8 tensors from safetensors files, which that library does not support for NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.headers import header_bytes, parse_header

FLOAT8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


def read_float8(file: Path, name: str) -> NDArray[Any]:
    """A tensor in one of the formats of FLOAT8, as a memory map."""
    with file.open("rb") as stream:
        size = header_bytes(stream, file)
        entry = parse_header(stream.read(size))[name]
    numbers = np.memmap(file, np.uint8, "r", 8 + size + entry.start, (entry.stop - entry.start,))
    tensor: NDArray[Any] = numbers.view(FLOAT8[entry.dtype]).reshape(entry.shape)
    return tensor
