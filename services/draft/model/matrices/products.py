"""Products with matrices of any kind, lookups of their rows and columns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from services.draft.kernels.cpu import panels
from services.draft.kernels.cpu.panels import Panels
from services.draft.model.matrices.mixed_precision import MixedPrecisionWeight, mixed_product
from services.draft.model.matrices.quantized import QuantizedWeight
from services.draft.model.matrices.sharded import ColumnSharded, RowSharded, all_gather, all_reduce, local_index

Matrix = jax.Array | QuantizedWeight | MixedPrecisionWeight | Panels | RowSharded | ColumnSharded


def product(x: jax.Array, matrix: Matrix, dtype: DTypeLike | None = None) -> jax.Array:
    """x @ matrix. x: [..., I]. Returns [..., O] in x's dtype, or in `dtype`, in which it is summed."""
    if isinstance(matrix, RowSharded):
        return all_reduce(product(x, matrix.part, jnp.float32)).astype(dtype or x.dtype)
    if isinstance(matrix, ColumnSharded):
        return all_gather(product(x, matrix.part, dtype))
    if isinstance(matrix, Panels):
        return panels.product(x, matrix, dtype)
    if isinstance(matrix, MixedPrecisionWeight):
        return mixed_product(x, matrix)
    if not isinstance(matrix, QuantizedWeight):
        return jnp.einsum("...i,io->...o", x, matrix, preferred_element_type=dtype)
    y = jnp.einsum("...i,io->...o", x, matrix.numbers.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y * matrix.scales).astype(dtype or x.dtype)


def linear(x: jax.Array, layer: dict[str, Any], name: str) -> jax.Array:
    """x @ layer[name] plus its bias, if there is one. x: [..., I]. Returns [..., O]."""
    y = product(x, layer[name])
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


def lookup(matrix: jax.Array | ColumnSharded, index: jax.Array) -> jax.Array:
    """Rows of a matrix [I, O], [..., O] for an index [...]."""
    return all_gather(matrix.part[index]) if isinstance(matrix, ColumnSharded) else matrix[index]


def columns(matrix: Matrix, index: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Columns of a matrix [I, O], [..., I] for an index [...]."""
    if isinstance(matrix, ColumnSharded):
        place, here = local_index(index, matrix.part.shape[-1])
        return all_reduce(jnp.where(here[..., None], columns(matrix.part, place, dtype), 0))
    assert not isinstance(matrix, RowSharded), "heads are sharded by columns"
    if isinstance(matrix, Panels):
        return panels.columns(matrix, index, dtype)
    assert not isinstance(matrix, MixedPrecisionWeight), "trained models have an embedding of their own"
    if not isinstance(matrix, QuantizedWeight):
        return matrix.T[index]
    return (matrix.numbers.T[index].astype(jnp.float32) * matrix.scales[index][..., None]).astype(dtype)
