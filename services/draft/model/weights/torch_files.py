"""Reads files of `torch.save` without PyTorch: tensors, lists, numbers and strings, and nothing that could run code.

A file is a zip archive: data.pkl describes the objects, data/0, data/1, ... hold the numbers of the storages.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError

_MAX_DESCRIPTION = 256 << 20  # bytes of data.pkl, some hundred a tensor
_STORAGES = {
    "FloatStorage": np.float32, "HalfStorage": np.float16, "BFloat16Storage": ml_dtypes.bfloat16,
    "DoubleStorage": np.float64, "LongStorage": np.int64, "IntStorage": np.int32, "ShortStorage": np.int16,
    "CharStorage": np.int8, "ByteStorage": np.uint8, "BoolStorage": np.bool_,
}  # fmt: skip


def load_torch_file(file: Path) -> Any:
    """The object in a file; tensors are NumPy arrays, mapped from the file. Raises ConfigError."""
    try:
        with zipfile.ZipFile(file) as archive:
            (description,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            folder = description.removesuffix("data.pkl")
            if (entry := archive.getinfo(description)).file_size > _MAX_DESCRIPTION or _packed(entry):
                raise pickle.UnpicklingError("its description is compressed, or too large")
            return _Reader(io.BytesIO(archive.read(description)), _storages(file, archive, folder)).load()
    except Exception as error:  # a crafted description can raise any of them
        raise ConfigError(f"{file} was not written by torch.save, or holds more than tensors: {error}") from None


def _storages(file: Path, archive: zipfile.ZipFile, folder: str) -> Callable[[Any, str], NDArray[Any]]:
    def storage(dtype: Any, key: str) -> NDArray[Any]:
        entry = archive.getinfo(f"{folder}data/{key}")
        if _packed(entry):  # a few bytes could unpack to any size
            raise pickle.UnpicklingError("it is compressed, which torch.save never does")
        with file.open("rb") as stream:  # the entry's own header holds the lengths of its name and padding
            stream.seek(entry.header_offset + 26)
            lengths = np.frombuffer(stream.read(4), "<u2")
        offset = entry.header_offset + 30 + int(lengths.sum())
        if not entry.file_size:
            return np.empty(0, dtype)
        return np.memmap(file, np.uint8, "r", offset, (entry.file_size,)).view(dtype)

    return storage


def _packed(entry: zipfile.ZipInfo) -> bool:
    return entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size


class _Reader(pickle.Unpickler):
    """Accepts only the classes that tensors need."""

    def __init__(self, stream: io.BytesIO, storage: Callable[[Any, str], NDArray[Any]]) -> None:
        super().__init__(stream)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        kind, dtype, key = pid[:3]
        if kind != "storage" or dtype not in _STORAGES.values():
            raise pickle.UnpicklingError(f"it refers to a {kind}")
        return self._storage(dtype, key)


def _tensor(storage: NDArray[Any], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Any:
    """A tensor as a view of its storage. Raises UnpicklingError for a view that reaches beyond it, or repeats parts."""
    if not isinstance(storage, np.ndarray) or storage.ndim != 1:
        raise pickle.UnpicklingError("a tensor has no storage")
    if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
        raise pickle.UnpicklingError("a tensor has a negative offset, size or stride")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) and last >= len(storage):
        raise pickle.UnpicklingError("a tensor lies beyond its storage")
    if math.prod(size) > len(storage):  # by strides of 0: a small file would become an array of any size
        raise pickle.UnpicklingError("a tensor is larger than its storage")
    bytes_a_step = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, bytes_a_step, writeable=False)
