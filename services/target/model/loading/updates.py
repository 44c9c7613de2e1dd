"""New weights for a running model: read, and checked for names and shapes before anything changes.

They come as safetensors: the files of a folder, or one file in memory that arrives in parts. Weights that do not fit
raise ConfigError.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError
from services.target.model.loading.support import read_settings

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LARGEST_HEADER = 100 << 20  # the format's own limit, in bytes
_NAMED = 5
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Settings that do not affect how a model computes.
_IDLE_SETTINGS = {
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id", "pad_token_id",
    "initializer_range", "attention_dropout", "task_specific_params", "tokenizer_class",
}  # fmt: skip


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor's entry in a header. start, stop: its bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(data: bytes | bytearray | memoryview, where: str) -> tuple[dict[str, HeaderEntry], int] | None:
    """Parse the header of a safetensors file from its first bytes. Returns its tensors, and its length in bytes.

    Returns None if the header is not complete. where: name of the file in errors.
    """
    if len(data) < 8:
        return None
    (size,) = struct.unpack("<Q", data[:8])
    if size > _LARGEST_HEADER:
        raise ConfigError(f"{where} is no safetensors file")
    if len(data) < 8 + size:
        return None
    try:
        content = json.loads(bytes(data[8 : 8 + size]))
        content.pop("__metadata__", None)
        entries = {
            name: HeaderEntry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in content.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{where} is no safetensors file") from None
    return entries, 8 + size


def check(
    entries: Mapping[str, HeaderEntry], shapes: Mapping[str, tuple[int, ...]], ignored: frozenset[str], *, whole: bool
) -> None:
    """Raise ConfigError for tensors that the model does not have, and with `whole` for missing ones.

    shapes: of the model's tensors. ignored: further names in its checkpoint that it does not use.
    """
    if not shapes:
        raise ConfigError("the weights of this model cannot be replaced while it runs; start the target anew")
    unknown = sorted(entries.keys() - shapes.keys() - ignored)
    if unknown:
        raise ConfigError(f"the model has no tensors of these names: {_names(unknown)}")
    missing = sorted(shapes.keys() - entries.keys()) if whole else []
    if missing:
        raise ConfigError(f"tensors are missing that the model needs: {_names(missing)}")
    for name, entry in entries.items():
        if name in ignored:
            continue
        if entry.shape != shapes[name]:
            raise ConfigError(f"{name} has shape {list(entry.shape)}; the model's has {list(shapes[name])}")
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ConfigError(f"{name} is of type {entry.dtype}; write one of {', '.join(_DTYPES)}")
        if entry.start < 0 or entry.stop - entry.start != dtype.itemsize * torch.Size(entry.shape).numel():
            raise ConfigError(f"{name} takes {entry.stop - entry.start} bytes, which does not fit its shape")


def tied_names(settings: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, str]:
    """Second names of tied tensors, with their own names. settings: the model's configuration; shapes: its tensors."""
    tied = bool(settings.get("tie_word_embeddings")) and _EMBEDDING in shapes and _HEAD not in shapes
    return {_HEAD: _EMBEDDING} if tied else {}


def by_own_names(entries: Mapping[str, HeaderEntry], tied: Mapping[str, str]) -> dict[str, str]:
    """The names of entries by the model's names for them. A tied tensor may come under either name, or both."""
    names = {name: name for name in entries if name not in tied}
    for second, own in tied.items():
        if second in entries:
            names.setdefault(own, second)
    return names


def _differ(second: str, own: str) -> ConfigError:
    return ConfigError(f"{second} and {own} are one tensor of this model, but differ; leave out {second}")


@dataclass(frozen=True)
class WeightsOrigin:
    """The origin of weights. folder: fingerprint of a checkpoint; tensors: digests of tensors that replaced its own."""

    folder: str
    tensors: Mapping[str, bytes] = field(default_factory=dict)

    def under(self, tensors: Mapping[str, bytes]) -> WeightsOrigin:
        """The origin after further tensors were replaced."""
        return WeightsOrigin(self.folder, {**self.tensors, **tensors})

    def covered(self, names: Iterable[str]) -> bool:
        """True if all tensors of a model, with these names, were replaced."""
        return all(name in self.tensors for name in names)

    def fingerprint(self, names: Iterable[str]) -> str:
        """A fingerprint that depends only on the weights, not on the parts and order in which they arrived."""
        if not self.tensors:
            return self.folder
        digest = hashlib.sha256(b"" if self.covered(names) else self.folder.encode())
        for name, content in sorted(self.tensors.items()):
            digest.update(f"\0{name}\0".encode() + content)
        return digest.hexdigest()[:16]


class CheckpointFolder:
    """The weights of a checkpoint's folder. settings: its configuration; files: the tensors of each file, by path."""

    def __init__(self, path: Path, trust_remote_code: bool) -> None:
        """Reads only headers and configuration. Raises ConfigError for an incomplete or invalid checkpoint, and OSError
        for a folder that cannot be read.
        """
        self.path = path
        self.settings: dict[str, Any] = read_settings(path, trust_remote_code)[0].to_dict()
        self.files = {file: _file_header(file) for file in checkpoint.weight_files(path)}
        self.fingerprint = checkpoint.fingerprint(path)

    @property
    def entries(self) -> dict[str, HeaderEntry]:
        """All tensors."""
        return {name: entry for entries in self.files.values() for name, entry in entries.items()}

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError for a folder with another configuration. settings: of the running model."""
        names = sorted((self.settings.keys() | settings.keys()) - _IDLE_SETTINGS)
        for name in names:
            if self.settings.get(name) != settings.get(name):
                raise ConfigError(
                    f"{self.path}/config.json has {name}: {self.settings.get(name)}; the model that runs has "
                    f"{settings.get(name)}; start the target anew to change it"
                )

    def check_tied(self, tied: Mapping[str, str]) -> None:
        """Raise ConfigError for a folder with two different tensors under the names of one tied tensor."""
        entries = self.entries
        for second, own in tied.items():
            if second in entries and own in entries:
                pair = {name: name for name in (second, own)}
                found = {name: tensor for part in self.tensors(pair) for name, tensor in part.items()}
                if not torch.equal(found[second], found[own]):
                    raise _differ(second, own)

    def tensors(self, names: Mapping[str, str]) -> Iterator[dict[str, Tensor]]:
        """Tensors, file by file. names: their names in the files, by the model's names."""
        for file, entries in self.files.items():
            here = {own: name for own, name in names.items() if name in entries}
            with safe_open(file, "pt") as content:
                yield {own: content.get_tensor(name) for own, name in here.items()}


def _file_header(file: Path) -> dict[str, HeaderEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LARGEST_HEADER
        header = read_header(start + stream.read(min(length, _LARGEST_HEADER)), str(file))
    if header is None:
        raise ConfigError(f"{file} is no safetensors file")
    entries, length = header
    if max((entry.stop for entry in entries.values()), default=0) != size - length:
        raise ConfigError(f"{file} is not complete")
    return entries


class IncomingTensors:
    """A safetensors file that arrives in parts. It is checked as soon as its header is complete."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> None:
        """shapes: of the model's tensors; tied: second names of some."""
        self._shapes, self._tied = shapes, tied
        self._names: dict[str, str] = {}  # names in the file, by the model's names
        self._data = bytearray()
        self._header: tuple[dict[str, HeaderEntry], int] | None = None
        self.digests: dict[str, bytes] = {}  # of the tensors, once all have arrived

    def add(self, part: bytes) -> None:
        """Add the next part. Raises ConfigError."""
        self._data += part
        if self._header is None:
            self._header = read_header(self._data, "what was sent")
            if self._header is not None:
                entries = self._header[0]
                self._names = by_own_names(entries, self._tied)
                own_entries = {own: entries[name] for own, name in self._names.items()}
                check(own_entries, self._shapes, frozenset(), whole=False)
        if self._header is not None and len(self._data) > self._size():
            raise ConfigError("more data was sent than the header states")

    def _size(self) -> int:
        assert self._header is not None, "the header is here"
        entries, length = self._header
        return length + max((entry.stop for entry in entries.values()), default=0)

    def finish(self) -> None:
        """Finish after the last part. Raises ConfigError if something is missing."""
        if self._header is None or len(self._data) < self._size():
            raise ConfigError("less data was sent than the header states")
        entries, length = self._header
        came: dict[str, bytes] = {}
        with memoryview(self._data) as data:
            for name, entry in entries.items():
                digest = hashlib.sha256(data[length + entry.start : length + entry.stop])
                digest.update(entry.dtype.encode())
                came[name] = digest.digest()
        for second, own in self._tied.items():
            if second in came and came[second] != came.get(own, came[second]):
                raise _differ(second, own)
        self.digests = {own: came[name] for own, name in self._names.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, as views of the received bytes, after `finish`."""
        assert self._header is not None, "what came is complete"
        entries, length = self._header
        return {
            own: torch.frombuffer(
                self._data, dtype=_DTYPES[e.dtype], count=torch.Size(e.shape).numel(), offset=length + e.start
            ).reshape(e.shape)
            if e.stop > e.start
            else torch.empty(e.shape, dtype=_DTYPES[e.dtype])
            for own, e in ((own, entries[name]) for own, name in self._names.items())
        }


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
