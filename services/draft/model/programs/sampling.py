"""Candidates: the most likely next tokens of a row, under the target's sampling parameters and noise.

Filters are thresholds: top-k and top-p both keep a token while the total weight of more likely tokens is below a limit,
and bisection finds the threshold much faster than sorting the vocabulary. Ties at the threshold are all kept, which is
accurate enough for draft tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from outrider.speculation.sampling import GREEDY_BELOW
from services.draft.model.programs.noise import gumbel_from_bits, token_bits

_BISECTIONS = 32
_DEEPEST = -100.0  # natural log of a probability that filters treat as 0


class Sampling(NamedTuple):
    """Sampling parameters of S sessions, [S] each; top_k 0 is off. keys: [S, R, 2] uint32, noise key of each row."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    keys: jax.Array


def candidates(
    logits: jax.Array, sampling: Sampling, count: int, ids: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The tokens that the target most likely samples, best first, with estimated log-probabilities.

    logits: [S, R, V]; ids: [V] int32, the target's id of each entry, if they differ: noise depends on the target's ids.
    Returns target ids [S, R, count] int32 and log-scores [S, R, count] float32.
    """
    if ids is None:
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    logits = logits.astype(jnp.float32)
    sampled = sampling.temperature >= GREEDY_BELOW
    scores = lax.cond(jnp.any(sampled), _noisy, lambda x, *_: x, logits, sampling, ids)
    top, places = lax.top_k(scores, count)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return ids[places], jnp.minimum(top - total, 0.0)


def _noisy(logits: jax.Array, sampling: Sampling, ids: jax.Array) -> jax.Array:
    sampled = sampling.temperature >= GREEDY_BELOW
    divisor = jnp.where(sampled, sampling.temperature, 1.0)[:, None, None]
    log_p = jax.nn.log_softmax(logits / divisor, axis=-1)
    filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    log_p = lax.cond(jnp.any(sampled & filters), _filtered, lambda x, _: x, log_p, sampling)
    noisy = log_p + gumbel_from_bits(token_bits(sampling.keys, ids.astype(jnp.uint32)))
    return jnp.where(sampled[:, None, None], noisy, logits)


def _filtered(log_p: jax.Array, sampling: Sampling) -> jax.Array:
    """Log-probabilities with -inf for tokens that top_k, top_p (of the tokens left by top_k) and min_p remove."""
    top_k, top_p, min_p = (x[:, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p))
    rest = jnp.ones_like(log_p)
    limit = jnp.where(top_k > 0, top_k, log_p.shape[-1] + 1).astype(jnp.float32)
    log_p = _keep_before(log_p, rest, jnp.broadcast_to(limit, log_p.shape[:-1]))
    p = jnp.exp(log_p)
    limit = jnp.where(top_p < 1, top_p * p.sum(axis=-1), 2.0)
    log_p = _keep_before(log_p, p, limit)
    least = jnp.where(min_p > 0, log_p.max(axis=-1) + jnp.log(jnp.maximum(min_p, 1e-30)), -jnp.inf)
    return jnp.where(log_p >= least[..., None], log_p, -jnp.inf)


def _keep_before(log_p: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """Keep tokens while more likely ones weigh less than the limit. log_p, weights: [S, R, V]; limit: [S, R]."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        above = jnp.where(log_p > middle[..., None], weights, 0.0).sum(axis=-1)
        fits = above < limit
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    start = (jnp.full_like(limit, _DEEPEST), jnp.zeros_like(limit))
    low, _ = lax.fori_loop(0, _BISECTIONS, halve, start)
    # Bisection ends with `low` too deep and `high` fitting, one float apart; if the deepest fits, `low` is unmoved.
    return jnp.where((log_p > low[..., None]) | (low <= _DEEPEST)[..., None], log_p, -jnp.inf)
