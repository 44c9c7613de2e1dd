"""Where the weights of a compiled program come from: the interface, and the modules of a loaded model.

Names are those of the model's parameters. A weight that the kernels can hold as its file does is packed without ever
being wide; any other one is read some rows at a time, in the format of the computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from services.target.kernels.cpu.matrices.weights import GGUF_GROUPS, Format, PackedWeight

_NUMBERS_AT_ONCE = 1 << 22  # of a weight that is widened


class StoredFormat(NamedTuple):
    """A format of the kernels that holds a weight as its file has it. groups: of a super-block, as of PackedWeight."""

    number_format: Format
    groups: int = GGUF_GROUPS

    def new(self, outputs: int, inputs: int) -> PackedWeight:
        """An empty weight."""
        return PackedWeight(outputs, inputs, self.number_format, groups=self.groups)


class WeightSource(Protocol):
    """The weights of a model. kinds: number formats of those that are kept as their file has them, by name."""

    kinds: Mapping[str, str]

    def number_format(self, name: str) -> StoredFormat | None:
        """The kernels' format that holds a weight as its file has it; None if it is to be widened."""
        ...

    def bits(self, name: str) -> float:
        """Bits that a weight takes where it is kept, or in the format of the computation."""
        ...

    def pack(self, name: str, packed: PackedWeight, outputs: Tensor) -> None:
        """Pack a weight that has a `number_format`. outputs: [n] int64, indices of its rows in the packed weight."""
        ...

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Some rows of a weight, in the format of the computation."""
        ...

    def plain(self, name: str) -> Tensor:
        """A whole tensor, in the format of the computation, or wider. Small ones, and embeddings."""
        ...

    def release(self, linear: Any, /) -> None:
        """A layer's weight has been packed; its plain form is needed no more."""
        ...


class ModuleWeights:
    """The weights of a loaded model of `transformers`."""

    kinds: Mapping[str, str] = {}

    def __init__(self, module: Any) -> None:
        self._module = module

    def number_format(self, name: str) -> None:
        """They are plain."""

    def bits(self, name: str) -> float:
        """As of the interface."""
        return 8.0 * self.plain(name).itemsize

    def pack(self, name: str, packed: PackedWeight, outputs: Tensor) -> None:
        """As of the interface; the builder fills plain weights some rows at a time instead."""
        packed.fill(outputs, self.plain(name))

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """As of the interface."""
        return self.plain(name)[begin:end]

    def plain(self, name: str) -> Tensor:
        """As of the interface; no copy."""
        return self._module.get_parameter(name).detach()  # type: ignore[no-any-return]

    def release(self, linear: Any) -> None:
        """Free the weight, so that at most one layer is in memory twice."""
        linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def parts_of(rows: int, inputs: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of rows of a weight that are widened at a time. multiple: of which a range begins at one."""
    step = max(1, _NUMBERS_AT_ONCE // inputs // multiple) * multiple
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)
