"""Arrays as packed bytes of frames: little-endian numbers of one type.

Most arrays of a frame have few numbers, and CPU caches are cold after a model's step: a Python list then takes a fifth
of the time of a NumPy array. NumPy arrays are used for tokens, scores and hidden states.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequest

U8, U32, I32, U64, F32, F64 = (np.dtype(name) for name in ("<u1", "<u4", "<i4", "<u8", "<f4", "<f8"))
_CODES = {U8: "B", U32: "I", I32: "i", U64: "Q", F32: "f", F64: "d"}  # type codes of the module array
_SWAPPED = sys.byteorder == "big"


def pack(values: Iterable[Any] | NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """Numbers as packed little-endian bytes."""
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False).tobytes()
    numbers = array(_CODES[dtype], values)
    if _SWAPPED:
        numbers.byteswap()
    return numbers.tobytes()


def unpack(data: bytes, dtype: np.dtype[Any], length: int | None = None) -> NDArray[Any]:
    """Packed little-endian bytes as a read-only array. Raises InvalidRequest for another length."""
    _check(data, dtype, length)
    return np.frombuffer(data, dtype=dtype)


def numbers_of(data: bytes, dtype: np.dtype[Any], length: int | None = None) -> list[Any]:
    """Packed little-endian bytes as a list of Python numbers. Raises InvalidRequest for another length."""
    _check(data, dtype, length)
    numbers = array(_CODES[dtype], data)
    if _SWAPPED:
        numbers.byteswap()
    return numbers.tolist()


def _check(data: bytes, dtype: np.dtype[Any], length: int | None) -> None:
    count, rest = divmod(len(data), dtype.itemsize)
    if rest:
        raise InvalidRequest(f"{len(data)} bytes are not an array of {dtype.itemsize}-byte numbers")
    if length is not None and count != length:
        raise InvalidRequest(f"an array has {count} elements where its frame needs {length}")


def concatenate(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> bytes:
    """Several arrays, one after the other, as packed bytes."""
    return b"".join([pack(part, dtype) for part in arrays])


def split(counts: Sequence[int], total: int) -> list[slice]:
    """Slices of consecutive parts with these counts. Raises InvalidRequest if the counts do not sum up to `total`."""
    ends = [0, *accumulate(counts)]
    if ends[-1] != total:
        raise InvalidRequest(f"the counts of a frame do not add up to its {total} elements")
    return list(map(slice, ends, ends[1:]))
