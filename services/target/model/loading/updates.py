"""New weights for a running model: read, and checked for names and shapes before anything changes.

They come as safetensors: the files of a folder, or one file in memory that arrives in parts. Weights that do not fit
raise ConfigError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.checkpoints import checkpoint
from outrider.checkpoints.gguf.record import read_record
from outrider.checkpoints.headers import (
    HeaderEntry,
    InvalidHeader,
    header_bytes,
    header_size,
    parse_header,
    some_names,
    tensor_bytes,
    tensor_headers,
)
from outrider.errors import ConfigError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HEADER_BYTES, _HEADER_BYTES_A_TENSOR = 1 << 16, 1 << 10  # at most, of a header that is sent
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
        raise ConfigError(f"the model has no tensors of these names: {some_names(unknown)}")
    missing = sorted(shapes.keys() - entries.keys()) if whole else []
    if missing:
        raise ConfigError(f"tensors are missing that the model needs: {some_names(missing)}")
    for name, entry in entries.items():
        if name in ignored:
            continue
        if entry.shape != shapes[name]:
            raise ConfigError(f"{name} has shape {list(entry.shape)}; the model's has {list(shapes[name])}")
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ConfigError(f"{name} is of type {entry.dtype}; write one of {', '.join(DTYPES)}")


def check_numbers(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise ConfigError for a tensor with NaN, or with numbers that are infinite in the model's dtype."""
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        ends = torch.stack(torch.aminmax(tensor.detach()))  # both are NaN if any number is
        if not ends.to(dtype).isfinite().all():
            has = "NaN" if ends.isnan().any() else f"{float(ends.abs().max()):g}"
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(f"{name} has {has} among its numbers, which weights in {kind} must not have")


def tied_names(shapes: Mapping[str, Any], *, tied: bool) -> dict[str, str]:
    """Second names of tied tensors, with their own names. shapes: the model's tensors. tied: as its settings say."""
    return {_HEAD: _EMBEDDING} if tied and _EMBEDDING in shapes and _HEAD not in shapes else {}


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
    """The weights of a checkpoint's folder. config: its config.json; files: the tensors of each file, by path.

    Nothing in the folder is run: config.json is data, and weights are read from safetensors files alone.
    """

    def __init__(self, path: Path) -> None:
        """Reads only headers and configuration. Raises ConfigError for an incomplete or invalid checkpoint, and OSError
        for a folder that cannot be read.
        """
        self.path = path
        self.config: dict[str, Any] = checkpoint.load_json(path / "config.json")
        described = read_record(path) is not None  # a GGUF file, from which updates are not read
        self.files = {} if described else {file: _file_header(file) for file in checkpoint.weight_files(path)}
        self.fingerprint = checkpoint.fingerprint(path)

    @property
    def entries(self) -> dict[str, HeaderEntry]:
        """All tensors."""
        return {name: entry for entries in self.files.values() for name, entry in entries.items()}

    def check_tied(self, tied: Mapping[str, str]) -> None:
        """Raise ConfigError for a folder with two different tensors under the names of one tied tensor."""
        entries = self.entries
        for second, own in tied.items():
            if second in entries and own in entries:
                found = self.tensors({name: name for name in (second, own)})
                if not torch.equal(found[second], found[own]):
                    raise _differ(second, own)

    def tensors(self, names: Mapping[str, str]) -> FolderTensors:
        """Tensors, which are read when they are asked for. names: their names in the files, by the model's names."""
        return FolderTensors(self.files, names)


class FolderTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint's files, read one by one, file after file. begun: one has been read."""

    def __init__(self, files: Mapping[Path, Mapping[str, HeaderEntry]], names: Mapping[str, str]) -> None:
        """files, names: as of CheckpointFolder and its `tensors`."""
        self._places = {
            own: (file, name) for file, entries in files.items() for own, name in names.items() if name in entries
        }
        self._open: tuple[Path, Any] | None = None
        self.begun = False

    def __getitem__(self, own: str) -> Tensor:
        file, name = self._places[own]
        if self._open is None or self._open[0] != file:
            self._open = file, safe_open(file, "pt")
        tensor: Tensor = self._open[1].get_tensor(name)
        self.begun = True
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _file_header(file: Path) -> dict[str, HeaderEntry]:
    entries = tensor_headers(file)
    with file.open("rb") as stream:
        length = 8 + header_bytes(stream, file)
    if tensor_bytes(entries) != file.stat().st_size - length:
        raise ConfigError(f"{file} is not complete")
    return entries


@dataclass(frozen=True)
class TakenTensors:
    """Tensors on the host that fit the model, by its own names, and their digests."""

    tensors: Mapping[str, Tensor]
    digests: Mapping[str, bytes]


def check_shapes(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
) -> None:
    """Raise ConfigError for tensors that do not fit the model. entries: dtypes and shapes by name."""
    letters = {dtype: name for name, dtype in DTYPES.items()}
    for name, (dtype, shape) in entries.items():
        entry = HeaderEntry(letters.get(dtype, str(dtype).removeprefix("torch.")), shape, 0, 0)
        check({tied.get(name, name): entry}, shapes, frozenset(), whole=False)


def take(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> TakenTensors:
    """Check tensors against the model. They are copied to the host where they are not there, and contiguous, already.

    Raises ConfigError.
    """
    check_shapes({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, shapes, tied)
    letters = {dtype: name for name, dtype in DTYPES.items()}
    taken: dict[str, Tensor] = {}
    digests: dict[str, bytes] = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().to("cpu").contiguous()
        digest = hashlib.sha256(whole.reshape(-1).view(torch.uint8).numpy().data)
        digest.update(letters[whole.dtype].encode())
        own = tied.get(name, name)
        if digests.setdefault(own, digest.digest()) != digest.digest():
            raise _differ(next(second for second, first in tied.items() if first == own), own)
        taken[own] = whole
    return TakenTensors(taken, digests)


class IncomingTensors:
    """A safetensors file that arrives in parts.

    Its header is checked as soon as it is complete, and bounded before: no more is kept than the header, and then the
    tensors of the model at most.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> None:
        """shapes: of the model's tensors; tied: second names of some."""
        self._shapes, self._tied = shapes, tied
        self._names: dict[str, str] = {}  # names in the file, by the model's names
        self._data = bytearray()
        self._start = 0  # of the tensors, in bytes; 0 until it is known
        self._size = 0  # of the whole file, in bytes; 0 until the header is complete
        self._entries: dict[str, HeaderEntry] = {}
        self.digests: dict[str, bytes] = {}  # of the tensors, once all have arrived
        self.tensors: dict[str, Tensor] = {}  # views of the received bytes, once all have arrived

    def add(self, part: bytes) -> None:
        """Add the next part. Raises ConfigError."""
        self._data += part
        if not self._size:
            self._read_header()
        if self._size and len(self._data) > self._size:
            raise ConfigError("more data was sent than the header states")

    def _read_header(self) -> None:
        """Read as much of the header as has arrived. Raises ConfigError."""
        try:
            if not self._start and len(self._data) >= 8:
                limit = _HEADER_BYTES + _HEADER_BYTES_A_TENSOR * len(self._shapes)
                self._start = 8 + header_size(self._data, limit)
            if not self._start or len(self._data) < self._start:
                return
            entries = parse_header(bytes(self._data[8 : self._start]))
        except InvalidHeader as error:
            raise ConfigError(f"what was sent is no safetensors file of this model: {error.message}") from None
        self._names = by_own_names(entries, self._tied)
        for names in (self._names, {own: second for second, own in self._tied.items() if second in entries}):
            check({own: entries[name] for own, name in names.items()}, self._shapes, frozenset(), whole=False)
        self._entries, self._size = entries, self._start + tensor_bytes(entries)

    def finish(self) -> None:
        """Finish after the last part. Raises ConfigError if something is missing."""
        if not self._size or len(self._data) < self._size:
            raise ConfigError("less data was sent than the header states")
        came: dict[str, bytes] = {}
        with memoryview(self._data) as data:
            for name, entry in self._entries.items():
                digest = hashlib.sha256(data[self._start + entry.start : self._start + entry.stop])
                digest.update(entry.dtype.encode())
                came[name] = digest.digest()
        for second, own in self._tied.items():
            if second in came and came[second] != came.get(own, came[second]):
                raise _differ(second, own)
        self.digests = {own: came[name] for own, name in self._names.items()}
        self.tensors = {own: self._tensor(self._entries[name]) for own, name in self._names.items()}

    def _tensor(self, entry: HeaderEntry) -> Tensor:
        dtype, start = DTYPES[entry.dtype], self._start + entry.start
        if entry.stop == entry.start:
            return torch.empty(entry.shape, dtype=dtype)
        count = torch.Size(entry.shape).numel()
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=start).reshape(entry.shape)
