"""Reads e4m3 numbers of safetensors files, for which that library has none for NumPy."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def read_float8(file: Path, name: str) -> NDArray[Any]:
    """A tensor, mapped."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        entry = json.loads(stream.read(size))[name]
    first, end = entry["data_offsets"]
    numbers = np.memmap(file, np.uint8, "r", 8 + size + first, (end - first,))
    return numbers.view(ml_dtypes.float8_e4m3fn).reshape(entry["shape"])
