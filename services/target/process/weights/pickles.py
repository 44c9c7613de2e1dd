"""Tensors in pickles, as SGLang's clients send them: decoded without calling anything that the pickle names.

A pickle is a program that may name any function. This reader knows a short list of names, and each stands for a
function of this module, which only builds tensors. A tensor is one of these:

    bytes in the pickle         `pickle.dumps` of a tensor
    shared memory of PyTorch    `torch.multiprocessing` with the sharing strategy file_system, on this machine
    a CUDA allocation           `torch.multiprocessing` of a CUDA tensor, on this machine, for a target on CUDA

What is decoded: pairs of a name and a tensor, or a bucket, which is one flat tensor and the place of each tensor in it.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.errors import ConfigError

_SHARED = re.compile(r"/?torch_[0-9]+_[0-9]+_[0-9]+")  # PyTorch's names of shared memory
_SHARED_FOLDER = Path("/dev/shm")
_SHARED_HEAD = 64  # bytes in front of the storage, which count its users
_DESCRIPTORS = (
    "its tensors are shared by file descriptors, which only children of the sender can open; call "
    'torch.multiprocessing.set_sharing_strategy("file_system") first, or send a safetensors file'
)
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8)
_MAX_NAME = 1 << 10  # letters
_ARCHIVE = b"PK"  # the beginning of a zip file, which `pickle.dumps` never writes for a storage
_TOO_LARGE = "its tensors are larger than the model's"


class _Refused(Exception):
    """A pickle that is not decoded; the message is for the caller."""


@dataclass(frozen=True)
class _Storage:
    """The bytes behind a tensor, [n] uint8. dtype: None until a typed storage or a tensor names it."""

    content: Tensor
    dtype: torch.dtype | None = None

    def view(self, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A tensor in these bytes. Raises RuntimeError if it does not lie inside."""
        assert self.dtype is not None, "tensors are made of typed storages"
        return self.content.view(self.dtype).as_strided(tuple(size), tuple(stride), offset)


class _Fields:
    """An object of a known class of SGLang's, of which only the attributes are of use."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        if args:
            raise _Refused("a bucket's entry has attributes by position")
        self.__dict__.update(attributes)


class _Entry(_Fields):
    """FlattenedTensorMetadata: name, shape, dtype, and from start_idx to end_idx in the bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int


class _OfRanks(_Fields):
    """LocalSerializedTensor: one pickle for each tensor-parallel rank."""

    values: list[bytes]


class _Class:
    """Stands for a class that is only named."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def __setstate__(self, _: Any) -> None:
        raise _Refused("it changes an object that only stands for a name")


class _Function(_Class):
    """Stands for a function: what this reader does instead."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class _Unpickler(pickle.Unpickler):
    """Names that are not in `names` are refused. limit: bytes of all tensors; cuda: CUDA allocations may be opened."""

    names: ClassVar[dict[tuple[str, str], str]] = {
        ("torch._utils", "_rebuild_tensor_v2"): "_tensor",
        ("torch._utils", "_rebuild_parameter"): "_parameter",
        ("torch.storage", "_load_from_bytes"): "_stored",
        ("torch.multiprocessing.reductions", "rebuild_tensor"): "_rebuilt",
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"): "_typed",
        ("torch.multiprocessing.reductions", "rebuild_typed_storage_child"): "_typed_child",
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"): "_shared",
        ("torch.multiprocessing.reductions", "rebuild_storage_empty"): "_empty",
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): "_on_cuda",
    }
    values: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): torch.Size,
    }  # fmt: skip
    marks = frozenset({
        ("torch", "Tensor"), ("torch.nn.parameter", "Parameter"),
        *product(("torch", "torch.storage"), ("UntypedStorage", "TypedStorage")),
    })  # fmt: skip
    classes = (("FlattenedTensorMetadata", _Entry), ("LocalSerializedTensor", _OfRanks))

    def __init__(self, content: bytes, limit: int, *, cuda: bool) -> None:
        super().__init__(io.BytesIO(content))
        self._left, self._cuda = limit, cuda
        self._read: dict[bytes, Tensor] = {}  # content of shared memory by name: tensors may be views of one storage
        self._opened: set[bytes] = set()  # CUDA allocations, likewise
        # A pickle can set attributes of a class, so each reader has its own.
        self._classes = {name: type(name, (base,), {}) for name, base in self.classes}

    def find_class(self, module: str, name: str) -> Any:
        """What a name of the pickle stands for. Raises _Refused."""
        if (known := self.names.get((module, name))) is not None:
            return _Function(getattr(self, known))
        if name == "_rebuild_cuda_tensor_modified":  # SGLang's, in several modules
            return _Function(self._on_cuda_of_uuid)
        if name in self._classes and module.partition(".")[0] in ("sglang", "slime", "verl"):
            return self._classes[name]
        if name == "rebuild_storage_fd":
            raise _Refused(_DESCRIPTORS)
        if (module, name) in self.values:
            return self.values[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in self.marks:
            return _Class()
        if module == "torch" and name.endswith("Storage") and hasattr(torch, name):
            return _Class(getattr(getattr(torch, name), "dtype", None))
        raise _Refused(f"it names {module[:100]}.{name[:100]}, which is not on the list of names that are decoded")

    def _spend(self, size: int) -> None:
        self._left -= size
        if size < 0 or self._left < 0:
            raise _Refused(_TOO_LARGE)

    # --- storages ---

    def _stored(self, content: bytes) -> _Storage:
        if content.startswith(_ARCHIVE):
            raise _Refused("it has an archive in place of a storage, whose content may be compressed")
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(found, torch.storage.TypedStorage):
            raise _Refused("it has bytes that are no storage of a tensor")
        storage = found._untyped_storage  # its public name warns
        self._spend(storage.nbytes())
        return _Storage(_bytes_of(storage), found.dtype)

    def _shared(
        self, _: _Class, manager: bytes, handle: bytes, size: int, dtype: torch.dtype | None = None
    ) -> _Storage:
        del manager  # keeps the memory for the sender
        name = handle.decode("ascii", "replace")
        size = size if dtype is None else size * dtype.itemsize
        if handle in self._read and len(self._read[handle]) == size:
            return _Storage(self._read[handle], dtype)
        self._spend(size)
        if not _SHARED.fullmatch(name):
            raise _Refused(f"{name[:100]} is no name of PyTorch's shared memory")
        try:
            with (_SHARED_FOLDER / name.strip("/")).open("rb") as stream:
                stream.seek(_SHARED_HEAD)
                content = bytearray(stream.read(size))
        except OSError as error:
            raise _Refused(f"shared memory {name} cannot be read on this machine: {error.strerror}") from None
        if len(content) < size:
            raise _Refused(f"shared memory {name} has {len(content)} bytes instead of {size}")
        self._read[handle] = (
            torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).view(torch.uint8)
        )
        return _Storage(self._read[handle], dtype)

    def _empty(self, _: _Class) -> _Storage:
        return _Storage(torch.empty(0, dtype=torch.uint8))

    def _typed(self, storage: _Storage, dtype: torch.dtype) -> _Storage:
        return _Storage(storage.content, dtype)

    def _typed_child(self, storage: _Storage, kind: _Class) -> _Storage:
        return _Storage(storage.content, kind.dtype)

    # --- tensors ---

    def _tensor(self, storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> Tensor:
        return storage.view(offset, size, stride)

    def _rebuilt(
        self, _: _Class, storage: _Storage, metadata: tuple[int, Sequence[int], Sequence[int], bool]
    ) -> Tensor:
        return storage.view(*metadata[:3])

    def _parameter(self, data: Tensor, *_: Any) -> Tensor:
        return data

    def _on_cuda(self, _: _Class, *args: Any) -> Tensor:
        """A tensor in an allocation of another process. args: as of `rebuild_cuda_tensor`, after the class."""
        from torch.multiprocessing import reductions

        if not self._cuda:
            raise _Refused("its tensors are on a GPU, but the target is not; send tensors on the CPU")
        size, stride, offset, _storage, dtype, device, handle, *sizes = args
        if dtype not in _DTYPES or not isinstance(device, int) or not isinstance(handle, bytes):
            raise _Refused("its CUDA tensors are not of the form that PyTorch writes")
        if handle not in self._opened:
            self._opened.add(handle)
            self._spend(int(sizes[0]))
        storage = torch.storage.TypedStorage
        known = (Tensor, size, stride, offset, storage, dtype, device, handle)
        rebuild: Any = reductions.rebuild_cuda_tensor
        found: Tensor = rebuild(*known, *sizes[:2], False, *sizes[3:])
        return found

    def _on_cuda_of_uuid(self, kind: _Class, *args: Any) -> Tensor:
        """SGLang's form, which names the device by its UUID, because processes may number devices differently."""
        return self._on_cuda(kind, *args[:5], _device_index(args[5]), *args[6:])


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _device_index(device: int | str) -> int:
    if isinstance(device, int):
        return device
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == device:
            return index
    raise _Refused(f"the GPU {device[:100]} is not visible to the target")


def named_tensors(content: bytes, limit: int, *, cuda: bool = False) -> dict[str, Tensor]:
    """The tensors of a pickle by name. limit: bytes of all tensors. Raises ConfigError."""
    try:
        found = _Unpickler(content, limit, cuda=cuda).load()
        return _named(found, limit, lambda part: _Unpickler(part, limit, cuda=cuda).load())
    except _Refused as error:
        raise ConfigError(f"the pickle of tensors is refused: {error}") from None
    except Exception as error:  # whatever damaged bytes lead to
        raise ConfigError(f"what was sent is no pickle of tensors: {type(error).__name__}: {error}") from None


def _named(found: Any, limit: int, load: Callable[[bytes], Any]) -> dict[str, Tensor]:
    if isinstance(found, dict) and "flattened_tensor" in found:
        return _of_bucket(found["flattened_tensor"], found.get("metadata"), limit)
    pairs = list(found.items()) if isinstance(found, dict) else found
    if not isinstance(pairs, list | tuple):
        raise _Refused("it has neither pairs of name and tensor, nor a bucket")
    named: dict[str, Tensor] = {}
    for pair in pairs:
        name, tensor = pair
        if isinstance(tensor, _OfRanks):  # every rank gets the whole tensor, on a device of its own
            tensor = load(tensor.values[0])
        _add(named, name, tensor)
    return named


def _of_bucket(flat: Any, metadata: Any, limit: int) -> dict[str, Tensor]:
    """The tensors of a bucket. Places are in bytes if the bucket is of bytes, which holds tensors of any dtypes.

    limit: bytes of the bucket, and of all its tensors: a storage may be smaller than tensors with strides of 0, and
    entries may lie over one another, until they are copied
    """
    if not isinstance(flat, Tensor) or not isinstance(metadata, list | tuple):
        raise _Refused("its bucket has no tensor, or no list of places")
    if flat.nbytes > limit:
        raise _Refused(_TOO_LARGE)
    flat, named, left = flat.reshape(-1), dict[str, Tensor](), limit
    for entry in metadata:
        if not isinstance(entry, _Entry) or not 0 <= entry.start_idx <= entry.end_idx <= len(flat):
            raise _Refused("its bucket has an entry that lies outside of it")
        part = flat[entry.start_idx : entry.end_idx]
        left -= len(part) * (1 if part.dtype == torch.uint8 else max(part.itemsize, entry.dtype.itemsize))
        if left < 0:
            raise _Refused(_TOO_LARGE)
        if part.dtype != entry.dtype:
            if part.dtype == torch.uint8 and part.storage_offset() % entry.dtype.itemsize:
                part = part.clone()  # a view of wider numbers must be aligned
            part = part.view(entry.dtype) if part.dtype == torch.uint8 else part.to(entry.dtype)
        _add(named, entry.name, part.reshape(tuple(entry.shape)))
    return named


def _add(named: dict[str, Tensor], name: Any, tensor: Any) -> None:
    if not isinstance(name, str) or len(name) > _MAX_NAME or not isinstance(tensor, Tensor):
        raise _Refused("it has an entry that is no name and tensor")
    if name in named:
        raise _Refused(f"it has {name} twice")
    named[name] = tensor
