"""Cross entropy between the target's distribution and a head's, with the head's matrix inside.

Logits over a vocabulary are by far the largest thing that a step makes. As nothing but a weighted sum comes of them,
their slopes are known at once, and those of states and matrix are formed in the same pass; the logits are never kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.model.matrices.mixed import Mixed, narrow_dot, narrow_slopes


class Product(NamedTuple):
    """dot: a @ b; slopes: what it hands back, of a, b and its own slope."""

    dot: Callable[[jax.Array, jax.Array], jax.Array]
    slopes: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


_NARROW = Product(narrow_dot, narrow_slopes)
_EXACT = Product(jnp.matmul, lambda a, b, slope: (slope @ b.T, a.T @ slope))


def cross_entropy(
    x: jax.Array, head: jax.Array | Mixed, p: jax.Array, weights: jax.Array, softcap: float | None = None
) -> jax.Array:
    """The sum over rows of weight * cross entropy, float32. The target's p and the weights have no slopes.

    x: [N, H]; head: [H, V]; p: [N, V], rows that add up to 1; weights: [N]; softcap: bound of the logits, which tanh
    bends towards it
    """
    if isinstance(head, Mixed):
        return _weighted(_NARROW, softcap, x, head.numbers, p, weights)
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
    slopes = (jnp.exp(logits - total[:, None]) - p.astype(jnp.float32)) * weights[:, None]
    if softcap is not None:  # whose slope is 1 - tanh^2
        slopes *= 1.0 - jnp.square(logits / softcap)
    return jnp.sum(weights * rows), (*product.slopes(x, head, slopes), p, weights)


def _backward(product: Product, softcap: float | None, kept: Any, slope: jax.Array) -> tuple[jax.Array, ...]:
    del product, softcap
    x_slope, head_slope, p, weights = kept
    return slope * x_slope, slope * head_slope, jnp.zeros_like(p), jnp.zeros_like(weights)


_weighted = jax.custom_vjp(_weighted_sum, nondiff_argnums=(0, 1))
_weighted.defvjp(_forward, _backward)
