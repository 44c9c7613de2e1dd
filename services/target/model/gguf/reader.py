"""The header of a GGUF file, read in a second: `gguf`'s own reader takes ten for the strings of a large vocabulary."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType
from numpy.typing import NDArray

from outrider.checkpoints.gguf.record import GgufRecord, GgufTensor
from outrider.errors import ConfigError


class HeaderReader(GGUFReader):
    """A `GGUFReader` whose arrays are cut by plain NumPy slices. Raises ValueError for a file that ends too early."""

    @property  # type: ignore[override]
    def data(self) -> NDArray[Any]:
        """The bytes of the file. The base class maps them as a class of their own, each slice of which is slow."""
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        kind = GGUFValueType(raw_type)
        if kind != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        inner, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        of, start, number = GGUFValueType(inner[0]), orig_offs + 12, int(count[0])
        head: list[NDArray[Any]] = [inner, count]
        if of == GGUFValueType.STRING:
            parts, end = self._strings(start, number)
            return end - orig_offs, head + parts, list(range(3, 3 + 2 * number, 2)), [kind, of][: 1 + bool(number)]
        numbers = self.gguf_scalar_to_np.get(of)
        if numbers is None:  # arrays of arrays
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(start, numbers, number)
        if len(values) < number:
            raise ValueError("the file ends within its header")
        singles = [values[i : i + 1] for i in range(number)]
        return 12 + values.nbytes, head + singles, list(range(2, 2 + number)), [kind, of][: 1 + bool(number)]

    def _strings(self, offset: int, count: int) -> tuple[list[NDArray[Any]], int]:
        """Lengths and bytes of strings, alternating, and the offset behind them."""
        parts: list[NDArray[Any]] = []
        data: Any = self._data
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                end = offset + 8 + unpack(data, offset)[0]
                parts += (data[offset : offset + 8].view(np.uint64), data[offset + 8 : end])
                offset = end
        except struct.error:
            offset = len(data) + 1
        if offset > len(data):
            raise ValueError("the file ends within its header")
        return parts, offset


@contextlib.contextmanager
def shared(reader: GGUFReader) -> Iterator[None]:
    """Inside this context, `transformers` uses this reader for every GGUF file, instead of reading it again."""
    before = gguf.GGUFReader
    gguf.GGUFReader = lambda *_, **__: reader  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        gguf.GGUFReader = before  # type: ignore[misc]


def record_of(reader: GGUFReader, file: Path, content: str) -> GgufRecord:
    """The record of a file. content: hash of samples of it. Raises ConfigError for bytes in another order."""
    if reader.byte_order != "I":
        raise ConfigError("it was written for machines of another byte order; convert it with llama.cpp's tools")
    tensors = {
        tensor.name: GgufTensor(
            tensor.tensor_type.name,
            tuple(reversed(tensor.shape.tolist())),
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    }
    found = reader.get_field("general.architecture")
    architecture = "" if found is None else str(found.contents())
    return GgufRecord(file.resolve(), file.stat().st_size, content, architecture, tensors)
