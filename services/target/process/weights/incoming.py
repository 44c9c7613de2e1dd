"""A pickle of tensors that arrives in parts."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import Tensor

from outrider.errors import ConfigError
from services.target.model.loading.updates import TakenTensors, take
from services.target.process.weights.pickles import named_tensors

_WIDEST = 8  # bytes of a number
_PICKLE_BYTES, _PICKLE_BYTES_A_TENSOR = 1 << 20, 4 << 10  # at most, beside the numbers; handles of CUDA are long


def max_update_bytes(shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> int:
    """Largest update of all tensors in one message, in bytes; 0 for a model without replaceable weights."""
    if not shapes:
        return 0
    named = [*shapes.values(), *(shapes[own] for own in tied.values())]
    return sum(_WIDEST * prod(shape) + _PICKLE_BYTES_A_TENSOR for shape in named) + _PICKLE_BYTES


class IncomingPickle:
    """Keeps the parts, up to the largest update of the model, and decodes them once all have arrived."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str], *, cuda: bool) -> None:
        """shapes: of the model's tensors; tied: second names of some. cuda: the target can open CUDA allocations."""
        self._shapes, self._tied, self._cuda = shapes, tied, cuda
        self._limit = max_update_bytes(shapes, tied)
        self._data = bytearray()
        self._taken = TakenTensors({}, {})

    def add(self, part: bytes) -> None:
        """Add the next part. Raises ConfigError."""
        self._data += part
        if len(self._data) > self._limit:
            raise ConfigError(
                f"the pickle has more than {self._limit} bytes, which all weights of this model need at most"
            )

    def finish(self) -> None:
        """Finish after the last part. Raises ConfigError for tensors that do not fit."""
        content, self._data = bytes(self._data), bytearray()
        self._taken = take(named_tensors(content, self._limit, cuda=self._cuda), self._shapes, self._tied)

    @property
    def digests(self) -> Mapping[str, bytes]:
        """Of the tensors, once all have arrived."""
        return self._taken.digests

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, once all have arrived."""
        return self._taken.tensors
