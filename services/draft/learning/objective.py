"""What is to become small: how far the head's distributions are from the target's, over all tokens ahead.

A row counts for a token ahead if the target's distribution there is known, and if the text up to and with the foretold
token is in the head's vocabulary: what it cannot propose, it need not foretell, and it never gets behind it. The
target's distribution is that of temperature 1 over the head's vocabulary.

Each token further ahead counts less by a factor (EAGLE-3: 0.8). Instead of weighing rows by it, that part of them looks
so far: packs hold their rows in random order, so the first ones are a fair sample, and the others cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.learning.algorithms.base import Algorithm
from services.draft.learning.batches import Batch
from services.draft.learning.loss import cross_entropy
from services.draft.learning.unroll import Ahead, take, unroll
from services.draft.model.layers.decoder import head as head_logits
from services.draft.model.layers.heads import Params
from services.draft.model.matrices.mixed import Mixed, narrow_dot


class Shared(NamedTuple):
    """What is the target's and stays as it is.

    embed: [V, H]; head: [Ht, V'] of the head's entries alone; draft_ids: [V] int32, -1 for tokens without an entry
    """

    embed: jax.Array
    head: jax.Array
    draft_ids: jax.Array


class Tally(NamedTuple):
    """Sums over rows, by tokens ahead, [K] float32: cross entropies, and rows that count."""

    losses: jax.Array
    counts: jax.Array


class Foretold(NamedTuple):
    """By tokens ahead and row, [K, B, R]. known: there is a token to foretell; place: its own among the head's guesses,
    from 0 on, with the noise that it was drawn with; vocabulary size or more if the head has no entry for it.
    """

    known: jax.Array
    place: jax.Array


@dataclass(frozen=True)
class Objective:
    """The objective of an algorithm. ahead: tokens; decay: part of the rows that look at each further one; narrow:
    bfloat16 products.

    factor, softcap: of the target's logits

    Where the algorithm has its states imitate the target's, a row's loss has their distance, too (smooth L1).
    """

    algorithm: Algorithm
    ahead: int
    decay: float
    narrow: bool
    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, params: Params, shared: Shared, batch: Batch) -> tuple[jax.Array, Tally]:
        """The weighted sum over all rows, float32, and what it is made of."""
        params = wrapped(params) if self.narrow else params
        head, p = self._head(params, shared), self._target(shared, batch)
        losses, counts = [], []
        rows = batch.rows.shape[1]
        counted = jnp.ones(batch.rows.shape, bool)
        each = [math.ceil(rows * self.decay**k) for k in range(self.ahead)]
        for k, said in enumerate(self._unrolled(params, shared, batch, each)):
            inside = self._foretold(shared, batch, said.place) >= 0
            counted = counted[:, : each[k]] & (k < batch.reach[:, : each[k]]) & inside
            weights = counted.reshape(-1).astype(jnp.float32)
            states = said.state.reshape(len(weights), -1)
            beside = take(p, said.place).reshape(len(weights), -1)
            model = self.algorithm.model
            loss = cross_entropy(model.factor * states, head, beside, weights, model.softcap)
            if self.algorithm.imitation:
                final = take(self._final(shared, batch), said.place).reshape(states.shape)
                loss += self.algorithm.imitation * jnp.sum(weights * _smooth_distance(states - final))
            losses.append(loss)
            counts.append(weights.sum())
        tally = Tally(jnp.stack(losses), jnp.stack(counts))
        return tally.losses.sum(), tally

    def foretell(self, params: Params, shared: Shared, batch: Batch) -> Foretold:
        """How the head does, as greedy drafting would see it."""
        params = wrapped(params) if self.narrow else params
        head = {"head": self._head(params, shared)}
        known, places = [], []
        each = [batch.rows.shape[1]] * self.ahead
        for k, said in enumerate(self._unrolled(params, shared, batch, each)):
            token = self._foretold(shared, batch, said.place)
            logits = head_logits(head, said.state, 2**31 - 1)
            own = jnp.take_along_axis(logits, jnp.maximum(token, 0)[..., None], axis=-1)
            better = jnp.sum(logits > own, axis=-1)
            known.append(k < batch.reach)
            places.append(jnp.where(token >= 0, better, logits.shape[-1]))
        return Foretold(jnp.stack(known), jnp.stack(places))

    def _unrolled(self, params: Params, shared: Shared, batch: Batch, each: Sequence[int]) -> Iterator[Ahead]:
        feature = self.algorithm.feature(params, batch.states.astype(jnp.float32))
        return unroll(self.algorithm.model, params, params.get("embed", shared.embed), feature, batch, each)

    def _head(self, params: Params, shared: Shared) -> Any:
        """The matrix of the logits; it may be the target's."""
        own = self.algorithm.head(params)
        own = shared.head if own is None else own
        if self.narrow:
            return own if isinstance(own, Mixed) else Mixed(own)
        return own.astype(jnp.float32)

    def _final(self, shared: Shared, batch: Batch) -> jax.Array:
        """The target's last states, [B, L, Ht]."""
        final: jax.Array = batch.states[..., -shared.head.shape[0] :]
        return final

    def _foretold(self, shared: Shared, batch: Batch, place: jax.Array) -> jax.Array:
        """The head's entry of the token that stands behind the rows, [B, R]; -1 if it has none."""
        return shared.draft_ids[jnp.take_along_axis(batch.tokens, place, axis=1)]

    def _target(self, shared: Shared, batch: Batch) -> jax.Array:
        """The target's distributions at all places, [B, L, V']."""
        multiply = narrow_dot if self.narrow else _exact
        logits = self.factor * multiply(self._final(shared, batch), shared.head)
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        p = jax.nn.softmax(logits, axis=-1)
        return p.astype(jnp.bfloat16) if self.narrow else p


def _smooth_distance(difference: jax.Array) -> jax.Array:
    """Mean of smooth L1 (Huber) over the numbers of each row. difference: [N, H]."""
    size = jnp.abs(difference)
    return jnp.mean(jnp.where(size < 1, 0.5 * size**2, size - 0.5), axis=-1)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))


def wrapped(params: Params) -> Params:
    """The same parameters, matrices to be multiplied in bfloat16. An embedding is looked up, so it stays."""
    return {
        name: part if name == "embed" else jax.tree.map(lambda leaf: Mixed(leaf) if leaf.ndim == 2 else leaf, part)
        for name, part in params.items()
    }
