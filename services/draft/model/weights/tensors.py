"""The tensors of a checkpoint by name: safetensors files, sharded or not, or files of `torch.save`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from outrider.checkpoints.checkpoint import weight_files
from outrider.checkpoints.config_json import load_config
from outrider.checkpoints.dequantize import BESIDE, INSTEAD, dequantize, plain_shape
from outrider.errors import ConfigError
from services.draft.model.weights.float8 import FLOAT8, read_float8
from services.draft.model.weights.torch_files import load_torch_file

Shapes = Mapping[str, tuple[int, ...]]

_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FORMATS = {"int64": "I64", "int32": "I32", "bool": "BOOL", "uint8": "U8", "int8": "I8", "float64": "F64",
            "float8_e4m3fn": "F8_E4M3"}  # fmt: skip


class Tensors:
    """Open files of a checkpoint; a context manager. Quantized weights are dequantized when they are read.

    invented: there are no files, and every tensor that is read has made-up numbers
    """

    invented = False

    def __init__(
        self,
        folder: Path,
        known_as: Callable[[str], str] = str,
        files: Sequence[Path] | None = None,
        replaced: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """known_as: maps a name in the files to the name that readers use. files: default all weight files of the
        folder. replaced: arrays to read in place of those of the files, by names in the files. Raises ConfigError.
        """
        self.folder = folder
        self._files: list[Any] = []
        self._places: dict[str, tuple[Mapping[str, Any] | Any, str, Path]] = {}
        for file in weight_files(folder, torch_files=True) if files is None else files:
            opened = _open(file)
            self._files.append(opened)
            for name in opened.keys():  # noqa: SIM118  (safe_open is no mapping)
                self._places[known_as(name)] = opened, name, file
        self._settings = _quantization(folder)
        self._parts = _parts_of_weights(self._places)  # of each quantized weight: names by part
        self._replaced = {known_as(name): array for name, array in (replaced or {}).items()}

    def __enter__(self) -> Tensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            if not isinstance(file, Mapping):
                file.__exit__(kind, error, trace)

    def __contains__(self, name: str) -> bool:
        return name in self._places or name in self._parts

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        hidden = {name for parts in self._parts.values() for name in parts.values()}
        return self._places.keys() - hidden | self._parts.keys()

    def check(self, what: str, expected: Shapes, ignored: Iterable[str] = (), within: str = "") -> None:
        """Raise ConfigError unless the tensors are exactly the expected ones, apart from ignored ones.

        what: the kind of model with its article, for messages. ignored: names, or ends of names. within: prefix of the
        names that belong to this kind of model.
        """
        missing = sorted(expected.keys() - self.names)
        if missing:
            raise ConfigError(f"{self.folder} lacks {len(missing)} tensors of {what}: {_some(missing)}")
        # Old exports contain the rotary constants.
        endings = (*ignored, "rotary_emb.inv_freq")
        extra = sorted(
            name for name in self.names - expected.keys() if name.startswith(within) and not name.endswith(endings)
        )
        if extra:
            extra = [self._places[name][1] if name in self._places else name for name in extra]
            raise ConfigError(f"{self.folder} has {len(extra)} tensors that {what} does not have: {_some(extra)}")

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        if name in self._replaced:
            return self._replaced[name].shape
        parts = self._parts.get(name, {})
        if parts and "weight" not in parts:
            shapes = {part: self.shape(known) for part, known in parts.items()}
            whole = parts.get("weight_shape")
            return plain_shape(shapes, self.read(whole, integers=True) if whole else None, self._settings)
        file, inner, _ = self._place(name)
        return tuple(file[inner].shape if isinstance(file, Mapping) else file.get_slice(inner).get_shape())

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError unless a tensor has the given shape."""
        if self.shape(name) != shape:
            found, inner = list(self.shape(name)), self._place(name)[1]
            raise ConfigError(f"tensor {inner} has shape {found}; config.json expects {list(shape)}")

    def read(self, name: str, shape: tuple[int, ...] | None = None, *, integers: bool = False) -> NDArray[Any]:
        """A tensor of floating-point numbers; with `integers`, of integers or booleans. Raises ConfigError.

        Quantized weights are dequantized to float32.
        """
        if shape is not None:
            self.check_shape(name, shape)
        if name in self._replaced:
            return self._replaced[name]
        if name in self._parts:
            parts = {part: self._stored(known) for part, known in self._parts[name].items()}
            return dequantize(name, parts, self._settings)
        file, inner, _ = self._place(name)
        tensor: NDArray[Any] = file[inner] if isinstance(file, Mapping) else _tensor(file, inner)
        accepted = {"int64", "int32", "bool"} if integers else set(_FLOATS)
        if tensor.dtype.name not in accepted:
            known = _FLOATS | _FORMATS
            found, wanted = known.get(tensor.dtype.name, tensor.dtype.name), sorted(known[name] for name in accepted)
            raise ConfigError(f"tensor {inner} has number format {found}; expected one of {wanted}")
        return tensor

    def _stored(self, name: str) -> NDArray[Any]:
        """A tensor in its stored number format."""
        file, inner, path = self._place(name)
        if isinstance(file, Mapping):
            return np.asarray(file[inner])
        return read_float8(path, inner) if file.get_slice(inner).get_dtype() in FLOAT8 else _tensor(file, inner)

    def _place(self, name: str) -> tuple[Mapping[str, Any] | Any, str, Path]:
        if name not in self._places:
            raise ConfigError(f"{self.folder} lacks the tensor {name}")
        return self._places[name]


def _quantization(folder: Path) -> dict[str, Any]:
    """The quantization settings of config.json."""
    raw = load_config(folder) if (folder / "config.json").is_file() else {}
    settings = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    return dict(settings or {})


def _parts_of_weights(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The stored tensors of each quantized weight, by the last part of their names."""
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        layer, _, part = name.rpartition(".")
        if part in (*INSTEAD, *BESIDE, "weight"):
            parts.setdefault(f"{layer}.weight", {})[part] = name
    return {
        weight: found
        for weight, found in parts.items()
        if found.keys() & set(INSTEAD) or ("weight" in found and len(found) > 1)
    }


def _open(file: Path) -> Any:
    if file.suffix != ".safetensors":
        content = load_torch_file(file)
        if not isinstance(content, Mapping) or not all(isinstance(array, np.ndarray) for array in content.values()):
            raise ConfigError(f"{file} does not hold tensors by name")
        return content
    try:
        opened: Any = safe_open(file, framework="numpy")
        return opened.__enter__()
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is not a readable safetensors file: {error}") from None


def _tensor(file: Any, name: str) -> NDArray[Any]:
    try:
        tensor: NDArray[Any] = file.get_tensor(name)
    except (SafetensorError, TypeError, KeyError, AttributeError) as error:
        found = file.get_slice(name).get_dtype()
        raise ConfigError(f"tensor {name} has number format {found}, which cannot be read: {error}") from None
    return tensor


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
