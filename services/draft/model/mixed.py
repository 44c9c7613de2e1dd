"""Products in a narrower format than their operands have, forwards and backwards, for what is trained.

Weights, states and sums are float32. Without the rule below JAX would multiply gradients, which are float32, as such.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


def _forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    a, b = a.astype(FORMAT), b.astype(FORMAT)
    return narrow_dot(a, b), (a, b)


def _backward(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = kept
    slope = slope.astype(FORMAT)
    return narrow_dot(slope, b.swapaxes(-1, -2)), narrow_dot(a.swapaxes(-1, -2), slope)


narrow_matmul.defvjp(_forward, _backward)
