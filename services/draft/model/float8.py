"""Weights of 8 bits with a scale a block of 128 x 128, as DeepSeek publishes them; they are widened when loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError

_BLOCK = 128


def read_float8(file: Path, name: str) -> NDArray[Any]:
    """A tensor of e4m3 numbers of a safetensors file, mapped; the safetensors library has none for NumPy.

    Raises ConfigError if it has another number format.
    """
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        entry = json.loads(stream.read(size))[name]
    if entry["dtype"] != "F8_E4M3":
        raise ConfigError(f"tensor {name} has scales beside it and number format {entry['dtype']}; expected F8_E4M3")
    first, end = entry["data_offsets"]
    numbers = np.memmap(file, np.uint8, "r", 8 + size + first, (end - first,))
    return numbers.view(ml_dtypes.float8_e4m3fn).reshape(entry["shape"])


def scaled_blocks(name: str, weight: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.float32]:
    """weight: [n, m]; scales: one for each block. Returns [n, m]. Raises ConfigError for other numbers of scales."""
    rows, columns = weight.shape
    blocks = -(-rows // _BLOCK), -(-columns // _BLOCK)
    if scales.shape != blocks:
        raise ConfigError(
            f"tensor {name} has scales of shape {list(scales.shape)}; blocks of {_BLOCK} x {_BLOCK} need {list(blocks)}"
        )
    wide = np.repeat(np.repeat(scales.astype(np.float32), _BLOCK, 0)[:rows], _BLOCK, 1)[:, :columns]
    return np.asarray(weight).astype(np.float32) * wide
