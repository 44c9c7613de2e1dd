"""Arrays as the packed bytes of frames: little-endian numbers, one kind an array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequest

U8, U32, I32, U64, F32, F64 = (np.dtype(name) for name in ("<u1", "<u4", "<i4", "<u8", "<f4", "<f8"))


def pack(values: Iterable[Any] | NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """Numbers as packed little-endian bytes."""
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False).tobytes()
    return np.array(list(values), dtype=dtype).tobytes()


def unpack(data: bytes, dtype: np.dtype[Any], length: int | None = None) -> NDArray[Any]:
    """Packed little-endian bytes as a read-only array. Raises InvalidRequest if the length is another."""
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{len(data)} bytes are no array of {dtype.itemsize}-byte numbers")
    array = np.frombuffer(data, dtype=dtype)
    if length is not None and len(array) != length:
        raise InvalidRequest(f"an array has {len(array)} elements where its frame needs {length}")
    return array


def concatenate(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> bytes:
    """Several arrays, one behind the other, as packed bytes."""
    return pack(np.concatenate(arrays), dtype) if arrays else b""


def split(counts: NDArray[np.integer], total: int) -> list[slice]:
    """Where the parts of `total` elements lie that have so many each. Raises InvalidRequest if they do not add up."""
    ends: list[int] = np.cumsum(counts, dtype=np.int64).tolist()
    if (ends[-1] if ends else 0) != total:
        raise InvalidRequest(f"the counts of a frame do not add up to its {total} elements")
    return list(map(slice, [0, *ends[:-1]], ends))
