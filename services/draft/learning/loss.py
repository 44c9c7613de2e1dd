"""Cross entropy between the target's distribution and the draft's, with the product with the head's matrix inside.

Logits over a vocabulary are by far the largest arrays of a training step. Only a weighted sum is computed from them, so
their gradients are known in the forward pass, which also forms those of states and matrix; logits are never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.model.matrices.mixed_precision import MixedPrecisionWeight, bf16_dot, bf16_gradients


class Product(NamedTuple):
    """dot: a @ b; gradients: gradients of a and b, from a, b and the gradient of the product."""

    dot: Callable[[jax.Array, jax.Array], jax.Array]
    gradients: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


_BF16 = Product(bf16_dot, bf16_gradients)
_EXACT = Product(jnp.matmul, lambda a, b, gradient: (gradient @ b.T, a.T @ gradient))


def cross_entropy(
    x: jax.Array, head: jax.Array | MixedPrecisionWeight, p: jax.Array, weights: jax.Array, softcap: float | None = None
) -> jax.Array:
    """The sum over rows of weight * cross entropy, float32. The target's p and the weights get no gradients.

    x: [N, H]; head: [H, V]; p: [N, V], rows that add up to 1; weights: [N]; softcap: bound of the logits by tanh
    """
    if isinstance(head, MixedPrecisionWeight):
        return _weighted(_BF16, softcap, x, head.numbers, p, weights)
    return _weighted(_EXACT, softcap, x, head, p, weights)


def _rows(
    product: Product, softcap: float | None, x: jax.Array, head: jax.Array, p: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, their normalizers, and the cross entropy of each row."""
    logits = product.dot(x, head)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    total = jax.nn.logsumexp(logits, axis=-1)
    return logits, total, total - jnp.sum(p.astype(jnp.float32) * logits, axis=-1)


def _weighted_sum(
    product: Product, softcap: float | None, x: jax.Array, head: jax.Array, p: jax.Array, weights: jax.Array
) -> jax.Array:
    return jnp.sum(weights * _rows(product, softcap, x, head, p)[2])


def _forward(
    product: Product, softcap: float | None, x: jax.Array, head: jax.Array, p: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Any]:
    logits, total, rows = _rows(product, softcap, x, head, p)
    gradients = (jnp.exp(logits - total[:, None]) - p.astype(jnp.float32)) * weights[:, None]
    if softcap is not None:  # the gradient of the softcap is 1 - tanh^2
        gradients *= 1.0 - jnp.square(logits / softcap)
    return jnp.sum(weights * rows), (*product.gradients(x, head, gradients), p, weights)


def _backward(product: Product, softcap: float | None, saved: Any, gradient: jax.Array) -> tuple[jax.Array, ...]:
    del product, softcap
    x_gradient, head_gradient, p, weights = saved
    return gradient * x_gradient, gradient * head_gradient, jnp.zeros_like(p), jnp.zeros_like(weights)


_weighted = jax.custom_vjp(_weighted_sum, nondiff_argnums=(0, 1))
_weighted.defvjp(_forward, _backward)
