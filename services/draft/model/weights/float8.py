"""Reads float8 tensors from safetensors files, which that library does not support for NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.checkpoint import header_bytes, tensor_headers

FLOAT8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


def read_float8(file: Path, name: str) -> NDArray[Any]:
    """A tensor in one of the formats of FLOAT8, as a memory map."""
    entry = tensor_headers(file)[name]
    with file.open("rb") as stream:
        size = header_bytes(stream, file)
    first, end = entry["data_offsets"]
    numbers = np.memmap(file, np.uint8, "r", 8 + size + first, (end - first,))
    tensor: NDArray[Any] = numbers.view(FLOAT8[entry["dtype"]]).reshape(entry["shape"])
    return tensor
