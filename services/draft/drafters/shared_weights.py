"""The weights that a draft shares with its target, replaced when the target has new weights.

    a separate thread     reads new weights, of a folder or as they arrived, and makes the draft's parameters of them
    the engine's thread   installs them between two steps, and drops cached prefixes

The new parameters have the shapes, formats and placement of the old ones, so the same programs run on. For a moment
both are on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints import checkpoint
from outrider.checkpoints.headers import HeaderEntry, InvalidHeader, header_size, parse_header, some_names, tensor_bytes
from outrider.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
Arrays = Mapping[str, NDArray[Any]]
Install = Callable[[], None]

_DTYPES: Mapping[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_HEADER_BYTES, _HEADER_BYTES_A_TENSOR = 1 << 16, 1 << 10  # at most


class LoadedWeights(NamedTuple):
    """Weights that are ready. install: called from the engine's thread; fingerprint: of the target's shared weights."""

    install: Install
    fingerprint: str


class SharedWeights:
    """Follows the target's weights for one drafter.

    shapes: of the shared tensors, by their names in the target's checkpoint
    fingerprint: of the weights that were installed last
    """

    def __init__(self, shapes: Shapes, folder: Path, read: Callable[[Path, Arrays], Install]) -> None:
        """folder: source of the present weights.

        read: prepares the weights of a folder, with some tensors replaced by others
        """
        self.shapes = shapes
        self._folder, self._read = folder, read
        self.fingerprint = checkpoint.fingerprint(folder)

    def load(self, path: str, fingerprint: str = "") -> LoadedWeights | None:
        """Load a folder's weights; None if they are installed. Called from any thread. Raises ConfigError.

        fingerprint: that the folder must have; empty for any
        """
        if not Path(path).is_dir():  # a name on the hub is refused
            raise ConfigError(f"there is no folder {path} on this machine")
        folder = checkpoint.resolve(path)
        found = checkpoint.fingerprint(folder)
        if fingerprint not in ("", found):
            raise ConfigError(f"{path} has weights with fingerprint {found}, not {fingerprint}")
        return LoadedWeights(self._read(folder, {}), found) if found != self.fingerprint else None

    def take(self, arrived: Arrays, fingerprint: str) -> LoadedWeights:
        """Use tensors that have arrived in place of those at the start. Called from any thread. Raises ConfigError."""
        return LoadedWeights(self._read(self._folder, arrived), fingerprint)

    def install(self, weights: LoadedWeights) -> None:
        """Compute with other weights from now on. Called from the engine's thread."""
        weights.install()
        self.fingerprint = weights.fingerprint


class ArrivingTensors:
    """A safetensors file with shared tensors that arrives in parts, never more than these tensors in float64."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._data = bytearray()
        self._start = self._size = 0  # of the tensors, and of the file, in bytes; 0 until the header is complete
        self._entries: dict[str, HeaderEntry] = {}

    def add(self, part: bytes) -> None:
        """Add the next part. Raises ConfigError."""
        self._data += part
        if not self._size and len(self._data) >= 8:
            self._read_header()
        if self._size and len(self._data) > self._size:
            raise ConfigError("more data was sent than the header states")

    def _read_header(self) -> None:
        try:
            start = 8 + header_size(self._data, _HEADER_BYTES + _HEADER_BYTES_A_TENSOR * len(self._shapes))
            if len(self._data) < start:
                return
            entries = parse_header(bytes(self._data[8:start]))
        except InvalidHeader as error:
            raise ConfigError(f"what was sent are no shared tensors: {error.message}") from None
        if unknown := sorted(entries.keys() - self._shapes.keys()):
            raise ConfigError(f"the draft shares no tensors of these names: {some_names(unknown)}")
        for name, entry in entries.items():
            if entry.shape != self._shapes[name] or entry.dtype not in _DTYPES:
                raise ConfigError(
                    f"{name} is of type {entry.dtype} and shape {list(entry.shape)}; the draft's has "
                    f"{list(self._shapes[name])}"
                )
        self._entries, self._start, self._size = entries, start, start + tensor_bytes(entries)

    def finish(self) -> dict[str, NDArray[Any]]:
        """The tensors, once all have arrived. Raises ConfigError if something is missing."""
        if not self._size or len(self._data) < self._size:
            raise ConfigError("less data was sent than the header states")
        return {name: self._array(entry) for name, entry in self._entries.items()}

    def _array(self, entry: HeaderEntry) -> NDArray[Any]:
        dtype, count = np.dtype(_DTYPES[entry.dtype]), int(np.prod(entry.shape, dtype=np.int64))
        array = np.frombuffer(self._data, dtype, count, self._start + entry.start).reshape(entry.shape)
        return array.astype(np.float32) if dtype == np.float64 else array
