"""Files of `torch.save`, read without PyTorch: tensors within their storages, or ConfigError, and no other class."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import ConfigError
from services.draft.model.weights.torch_files import load_torch_file
from tests.fuzz.choices import Choices

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")
_STORAGE = bytes(range(64))
_KINDS = (b"FloatStorage", b"BFloat16Storage", b"LongStorage", b"BoolStorage", b"DoubleStorage", b"XStorage")
_GLOBALS = (b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_parameter", b"os\nsystem")


def fuzz(data: bytes) -> None:
    """The first byte chooses whether the rest is a whole file, a pickle, or decisions about tensors."""
    choices, file = Choices(data), Path(_FOLDER.name) / "pytorch_model.bin"
    raw = choices.below(3)
    file.write_bytes(choices.rest() if raw == 0 else _archive(choices.rest() if raw == 1 else _pickled(choices)))
    try:
        content = load_torch_file(file)
    except ConfigError:
        return
    _check(content)


def seeds() -> list[bytes]:
    """A good file, a good pickle, decisions."""
    good = _pickled(Choices(bytes((1, 0, 1, 0, 0, 0, 1, 2, 0, 2, 0, 1, 0, 1))))
    return [b"\0" + _archive(good), b"\1" + good, b"\2\1\0\1\0\0\0\1\2\0\2\0\1\0\1"]


def _check(content: Any) -> None:
    """Every number of every tensor can be read, and lies in the file."""
    for value in content.values() if isinstance(content, Mapping) else [content]:
        if isinstance(value, np.ndarray) and value.size:
            if value.nbytes > 1 << 20:
                raise AssertionError(f"a file of some bytes holds a tensor of {value.nbytes} bytes")
            value.tobytes()
            _inside(value)


def _inside(value: np.ndarray) -> None:
    owner = value
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    low, high = np.lib.array_utils.byte_bounds(value)
    first, end = np.lib.array_utils.byte_bounds(owner)
    if not first <= low <= high <= end:
        raise AssertionError(f"a tensor with strides {value.strides} lies beyond its storage")


def _archive(pickled: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("model/data.pkl", pickled)
        archive.writestr("model/data/0", _STORAGE)
    return stream.getvalue()


def _pickled(choices: Choices) -> bytes:
    """A dict of tensors, as PyTorch pickles it."""
    return b"\x80\x02}" + b"".join(_text(f"t{i}") + _tensor(choices) + b"s" for i in range(choices.below(3))) + b"."


def _tensor(choices: Choices) -> bytes:
    storage = b"(" + _text("storage") + b"ctorch\n" + choices.one(_KINDS) + b"\n"
    storage += _text(choices.one(("0", "0", "1"))) + _text("cpu") + _number(choices.below(64)) + b"tQ"
    size, stride = choices.items(lambda: _edge(choices), 3), choices.items(lambda: _edge(choices), 3)
    shape = _numbers(size) + _numbers(stride)
    return b"c" + choices.one(_GLOBALS) + b"\n(" + storage + _number(_edge(choices)) + shape + b"\x89NtR"


def _edge(choices: Choices) -> int:
    return choices.integer() if choices.chance(8) else choices.below(8) - 2


def _numbers(values: list[int]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _number(value: int) -> bytes:
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(content),)) + content


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()
