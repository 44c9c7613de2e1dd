"""Products of float32 matrices in bfloat16, in the forward and the backward pass, for training.

Weights, states and sums are float32. Without the custom rule below JAX would multiply gradients in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

FORMAT = jnp.bfloat16


class MixedPrecisionWeight(NamedTuple):
    """A float32 matrix that is multiplied in bfloat16. numbers: [I, O] float32."""

    numbers: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.numbers.shape


def mixed_product(x: jax.Array, matrix: MixedPrecisionWeight) -> jax.Array:
    """x @ matrix. x: [..., I]. Returns [..., O] float32."""
    rows = bf16_matmul(x.reshape(-1, x.shape[-1]), matrix.numbers)
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


@jax.custom_vjp
def bf16_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b, with the same leading dimensions. Returns float32."""
    return bf16_dot(a, b)


def bf16_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """`bf16_matmul` without its rule for gradients."""
    return jnp.matmul(a.astype(FORMAT), b.astype(FORMAT), preferred_element_type=jnp.float32)


def bf16_gradients(a: jax.Array, b: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of `bf16_dot(a, b)`: gradient @ bᵀ and aᵀ @ gradient, both float32.

    XLA's CPU products of bfloat16 read an operand across its rows slowly; transposing it in memory first makes them
    three to four times faster. On other devices the transposition would only cost.
    """
    a, b, gradient = a.astype(FORMAT), b.astype(FORMAT), gradient.astype(FORMAT)
    across = bf16_dot if a.ndim > 2 else _product_in_memory  # XLA's CPU backend has no fast batched product anyway
    return across(gradient, b.swapaxes(-1, -2)), across(a.swapaxes(-1, -2), gradient)


def _product_in_memory(a: jax.Array, b: jax.Array) -> jax.Array:
    product: jax.Array = jax.lax.platform_dependent(a, b, cpu=_by_rows, default=bf16_dot)
    return product


def _by_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    rows = Layout((0, 1))
    product = bf16_dot(with_layout_constraint(a, rows), with_layout_constraint(b, rows))
    laid_out: jax.Array = with_layout_constraint(product, rows)
    return laid_out


def _forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    a, b = a.astype(FORMAT), b.astype(FORMAT)
    return bf16_dot(a, b), (a, b)


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return bf16_gradients(*saved, gradient)


bf16_matmul.defvjp(_forward, _backward)
