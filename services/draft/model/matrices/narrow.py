"""Matrices of 8 bits: numbers with a scale for each output, widened as they are used.

    int8    the largest number of a column is 127
    fp8     the largest number of a column is 448, the largest of e4m3

Norms, biases, embeddings, routers and the small matrices of latent attention stay as they are. A head that is tied to
the embedding is narrow as both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from outrider.errors import ConfigError
from services.draft.kernels.cpu import panels
from services.draft.kernels.cpu.panels import PanelMaker, Panels
from services.draft.model.matrices.mixed import Mixed, mixed_product
from services.draft.model.matrices.parts import Joined, Summed, added, own_index, side_by_side

Params = dict[str, Any]

_KINDS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
_MATRICES = {
    "head", "fuse", "qkv", "output", "gate_up", "down", "query", "query_down", "latent", "shared_gate_up",
    "shared_down", "experts_gate_up", "experts_down",
}  # fmt: skip
_NONE = "unquant"


class Narrow(NamedTuple):
    """numbers: [..., I, O] of 8 bits; scales: [..., O] float32."""

    numbers: jax.Array
    scales: jax.Array

    def __getitem__(self, index: Any) -> Any:  # of experts
        return Narrow(self.numbers[index], self.scales[index])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.numbers.shape


Matrix = jax.Array | Narrow | Mixed | Panels | Summed | Joined


def check_quantization(kind: str | None) -> None:
    """Raise ConfigError for a number format that weights cannot have."""
    if kind not in (None, _NONE, *_KINDS):
        raise ConfigError(
            f"--speculative-draft-model-quantization {kind} is not supported; expected one of "
            f"{', '.join((*_KINDS, _NONE))}"
        )


def narrows(kind: str | None) -> str | None:
    """The number format that a choice stands for; None if weights stay as they are."""
    return None if kind == _NONE else kind


def narrow(params: Params, kind: str | None) -> Params:
    """The same parameters with narrow matrices. kind: "int8" or "fp8"; None and "unquant" change nothing."""
    chosen = narrows(kind)
    if chosen is None:
        return params
    return {name: _narrowed(name, value, chosen) for name, value in params.items()}


def _narrowed(name: str, value: Any, kind: str) -> Any:
    if isinstance(value, list):
        return [narrow(part, kind) for part in value]
    return _squeeze(value, kind) if name in _MATRICES else value


def _squeeze(matrix: jax.Array, kind: str) -> Narrow:
    dtype, largest = _KINDS[kind]
    wide = matrix.astype(jnp.float32)
    scales = jnp.maximum(jnp.abs(wide).max(axis=-2), 1e-12) / largest
    numbers = wide / scales[..., None, :]
    return Narrow((jnp.round(numbers) if kind == "int8" else numbers).astype(dtype), scales)


def in_panels(params: Params, maker: PanelMaker | None = None) -> Params:
    """The same parameters with matrices laid out for the compiled kernels of CPUs, but for those of fp8."""
    maker = maker or PanelMaker()
    return {name: _laid_out(name, value, maker) for name, value in params.items()}


def _laid_out(name: str, value: Any, maker: PanelMaker) -> Any:
    if isinstance(value, list):
        return [in_panels(part, maker) for part in value]
    if name not in _MATRICES:
        return value
    if not isinstance(value, Narrow):
        return maker.make(value)
    return maker.make(value.numbers, value.scales) if value.numbers.dtype == jnp.int8 else value


def product(x: jax.Array, matrix: Matrix, dtype: Any = None) -> jax.Array:
    """x @ matrix. x: [..., I]. Returns [..., O] of x's dtype, or of another, in which it is summed."""
    if isinstance(matrix, Summed):
        return added(product(x, matrix.part, jnp.float32)).astype(dtype or x.dtype)
    if isinstance(matrix, Joined):
        return side_by_side(product(x, matrix.part, dtype))
    if isinstance(matrix, Panels):
        return panels.product(x, matrix, dtype)
    if isinstance(matrix, Mixed):
        return mixed_product(x, matrix)
    if not isinstance(matrix, Narrow):
        return jnp.einsum("...i,io->...o", x, matrix, preferred_element_type=dtype)
    y = jnp.einsum("...i,io->...o", x, matrix.numbers.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y * matrix.scales).astype(dtype or x.dtype)


def linear(x: jax.Array, layer: dict[str, Any], name: str) -> jax.Array:
    """x @ layer[name], and its bias if there is one. x: [..., I]. Returns [..., O]."""
    y = product(x, layer[name])
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


def lookup(matrix: jax.Array | Joined, index: jax.Array) -> jax.Array:
    """Rows of a matrix [I, O], [..., O] for an index [...]."""
    return side_by_side(matrix.part[index]) if isinstance(matrix, Joined) else matrix[index]


def columns(matrix: Matrix, index: jax.Array, dtype: Any) -> jax.Array:
    """Columns of a matrix [I, O], [..., I] for an index [...]."""
    if isinstance(matrix, Joined):
        place, here = own_index(index, matrix.part.shape[-1])
        return added(jnp.where(here[..., None], columns(matrix.part, place, dtype), 0))
    assert not isinstance(matrix, Summed), "heads are split by their entries"
    if isinstance(matrix, Panels):
        return panels.columns(matrix, index, dtype)
    assert not isinstance(matrix, Mixed), "what is trained has an embedding of its own"
    if not isinstance(matrix, Narrow):
        return matrix.T[index]
    return (matrix.numbers.T[index].astype(jnp.float32) * matrix.scales[index][..., None]).astype(dtype)
