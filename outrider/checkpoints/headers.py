"""Headers of safetensors files, checked before any tensor is read or buffered.

A file is the size of the header in eight bytes, the header as JSON, and the tensors. Offsets count from the end of the
header. As in the library `safetensors`, the tensors must lie one after the other, without gaps and overlaps: then the
size of a file follows from the shapes that its header names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import ConfigError

MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_MAX_DIMENSIONS = 32
_NAMED, _NAME_LETTERS = 5, 120  # at most, of the names in an error
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor's entry in a header. start, stop: its bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class InvalidHeader(ConfigError):
    """Bytes that are no header of a safetensors file; the message has the reason."""


def header_size(head: bytes | bytearray | memoryview, limit: int = MAX_HEADER_BYTES) -> int:
    """The size of a header, in bytes, from the first eight bytes of a file. Raises InvalidHeader beyond the limit."""
    size = int(struct.unpack("<Q", head[:8])[0])
    if size > limit:
        raise InvalidHeader(f"its header would have {size} bytes; at most {limit} are read")
    return size


def parse_header(content: bytes) -> dict[str, HeaderEntry]:
    """The tensors of a header by name. Raises InvalidHeader unless they lie one after the other, from the first byte.

    content: the header, without its size
    """
    try:
        found: dict[str, Any] = json.loads(content, object_pairs_hook=_once)
        found.pop("__metadata__", None)
        entries = {name: _entry(entry) for name, entry in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidHeader("its header does not describe tensors") from None
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            where = "a gap" if entry.start > end else "an overlap"
            raise InvalidHeader(f"there is {where} in front of the tensor {name[:200]}")
        size = _ITEM_BYTES.get(entry.dtype)
        if entry.stop < end or (size is not None and entry.stop - end != size * prod(entry.shape)):
            raise InvalidHeader(f"{name[:200]} takes {entry.stop - end} bytes, which does not fit its shape")
        end = entry.stop
    return entries


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a header. Raises ValueError for one with a name twice, of which readers take one or the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _entry(entry: Any) -> HeaderEntry:
    """One entry. Raises ValueError, TypeError, KeyError."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    numbers = (*shape, start, stop)
    if not isinstance(dtype, str) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise ValueError
    return HeaderEntry(dtype, shape, start, stop)


def tensor_bytes(entries: dict[str, HeaderEntry]) -> int:
    """Size of all tensors, in bytes."""
    return max((entry.stop for entry in entries.values()), default=0)


def header_bytes(stream: BinaryIO, file: Path) -> int:
    """Read the size of a safetensors file's header, in bytes. Raises ConfigError for a damaged file."""
    head = stream.read(8)
    if len(head) == 8 and int(struct.unpack("<Q", head)[0]) <= file.stat().st_size - 8:
        try:
            return header_size(head)
        except InvalidHeader as error:
            raise ConfigError(f"{file} is damaged: {error.message}; download it again") from None
    raise ConfigError(f"{file} is damaged: it has no header of a safetensors file; download it again")


def tensor_headers(file: Path) -> dict[str, HeaderEntry]:
    """The header entries of a safetensors file by tensor name. Raises ConfigError if the header is damaged."""
    with file.open("rb") as stream:
        content = stream.read(header_bytes(stream, file))
    try:
        return parse_header(content)
    except InvalidHeader as error:
        raise ConfigError(f"{file} is damaged: {error.message}; download it again") from None


def some_names(names: Sequence[str]) -> str:
    """The first of some tensors' names and the number of the others, for errors: headers may have very many."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(name[:_NAME_LETTERS] for name in names[:_NAMED]) + more
