"""Random weights in place of those of a checkpoint (--speculative-draft-load-format dummy), to measure without them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.checkpoint import weight_files
from outrider.config import LoadFormat
from outrider.errors import ConfigError
from services.draft.model.weights.tensors import Shapes, Tensors

_DEVIATION = 0.02  # of random matrices, as of most initial weights


def open_tensors(
    folder: Path,
    known_as: Callable[[str], str] = str,
    load_format: LoadFormat = "auto",
    replaced: Mapping[str, NDArray[Any]] | None = None,
) -> Tensors:
    """The tensors of a draft checkpoint. load_format: --speculative-draft-load-format. Raises ConfigError.

    replaced: as of `Tensors`
    """
    if load_format == "dummy":
        return DummyTensors(folder, known_as)
    files = weight_files(folder, torch_files=load_format != "safetensors", safetensors=load_format != "pt")
    return Tensors(folder, known_as, files, replaced)


def has_weights(folder: Path) -> bool:
    """True if a folder has weight files."""
    try:
        return bool(weight_files(folder, torch_files=True))
    except ConfigError:
        return False


class DummyTensors(Tensors):
    """Tensors with random numbers, equal at every start.

    Names and shapes are those of the weight files; without such files, those that config.json makes a reader expect.
    """

    def __init__(self, folder: Path, known_as: Callable[[str], str] = str) -> None:
        """known_as: as of `Tensors`."""
        self.invented = not has_weights(folder)
        super().__init__(folder, known_as, [] if self.invented else None)

    def check(self, what: str, expected: Shapes, ignored: Iterable[str] = (), within: str = "") -> None:
        """As of `Tensors`; without files nothing is checked."""
        if not self.invented:
            super().check(what, expected, ignored, within)

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """As of `Tensors`; without files nothing is checked."""
        if not self.invented:
            super().check_shape(name, shape)

    def read(self, name: str, shape: tuple[int, ...] | None = None, *, integers: bool = False) -> NDArray[Any]:
        """Random numbers; ones for norms, zeros for biases. Integers are those of the file, or zeros."""
        if integers and not self.invented:
            return super().read(name, shape, integers=True)
        if shape is None:
            shape = self.shape(name)
        self.check_shape(name, shape)
        if integers:
            return np.zeros(shape, np.int64)
        if len(shape) < 2:
            return np.full(shape, float("norm" in name), np.float32)
        random = np.random.default_rng(zlib.crc32(name.encode()))
        return _DEVIATION * random.standard_normal(shape, np.float32)
