"""Products in a narrower format than their operands have, forwards and backwards, for what is trained.

Weights, states and sums are float32. Without the rule below JAX would multiply gradients, which are float32, as such.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

FORMAT = jnp.bfloat16


class Mixed(NamedTuple):
    """A matrix that is multiplied so. numbers: [I, O] float32."""

    numbers: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.numbers.shape


def mixed_product(x: jax.Array, matrix: Mixed) -> jax.Array:
    """x @ matrix. x: [..., I]. Returns [..., O] float32."""
    rows = narrow_matmul(x.reshape(-1, x.shape[-1]), matrix.numbers)
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


@jax.custom_vjp
def narrow_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b, with the same leading dimensions. Returns float32."""
    return narrow_dot(a, b)


def narrow_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The same without a rule for gradients."""
    return jnp.matmul(a.astype(FORMAT), b.astype(FORMAT), preferred_element_type=jnp.float32)


def narrow_slopes(a: jax.Array, b: jax.Array, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `narrow_dot(a, b)` hands back: slope @ bᵀ and aᵀ @ slope, both float32.

    XLA's CPU products of bfloat16 have no fast way to read an operand across its rows: it is three to four times faster
    to exchange rows and columns in memory first. Elsewhere that would only cost.
    """
    a, b, slope = a.astype(FORMAT), b.astype(FORMAT), slope.astype(FORMAT)
    across = narrow_dot if a.ndim > 2 else _product_in_memory  # several matrices at a time have no product at all, then
    return across(slope, b.swapaxes(-1, -2)), across(a.swapaxes(-1, -2), slope)


def _product_in_memory(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(a, b, cpu=_by_rows, default=narrow_dot)


def _by_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    rows = Layout((0, 1))
    product = narrow_dot(with_layout_constraint(a, rows), with_layout_constraint(b, rows))
    return with_layout_constraint(product, rows)


def _forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    a, b = a.astype(FORMAT), b.astype(FORMAT)
    return narrow_dot(a, b), (a, b)


def _backward(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    return narrow_slopes(*kept, slope)


narrow_matmul.defvjp(_forward, _backward)
