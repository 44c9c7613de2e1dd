"""The training objective: the cross entropy between the draft's and the target's distributions, over all unroll steps.

A row counts in an unroll step if the target's distribution there is known, and if all tokens up to the predicted one
are in the draft's vocabulary: a draft cannot propose other tokens, and never gets behind them. The target's
distribution is that of temperature 1 over the draft's vocabulary.

The weight of each further unroll step shrinks by a factor (EAGLE-3: 0.8). Instead of weighting rows, the step uses that
fraction of them: packs hold their rows in random order, so the first ones are a fair sample, and others cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.learning.algorithms.base import Algorithm
from services.draft.learning.loss import cross_entropy
from services.draft.learning.records.batches import Batch
from services.draft.learning.unroll import UnrollStep, take, unroll
from services.draft.learning.unroll_block import unroll_block
from services.draft.model.layers.decoder import head as head_logits
from services.draft.model.layers.heads import BlockHead
from services.draft.model.matrices.mixed_precision import MixedPrecisionWeight, bf16_dot
from services.draft.model.params import Params

_EXACT = ("embed", "router")


class TargetWeights(NamedTuple):
    """Frozen weights of the target.

    embed: [V, H]; head: [Ht, V'], only the draft's entries; draft_ids: [V] int32, -1 for tokens without an entry
    """

    embed: jax.Array
    head: jax.Array
    draft_ids: jax.Array


class LossSums(NamedTuple):
    """Sums over rows by unroll step, [K] float32: cross entropies, and rows that count."""

    losses: jax.Array
    counts: jax.Array


class TokenRanks(NamedTuple):
    """By unroll step and trained row, [K, B, R]. known: there is a token to predict; rank: its rank among the draft's
    candidates from 0 on; at least the vocabulary size if the draft has no entry for it.
    """

    known: jax.Array
    rank: jax.Array


class TokenChances(NamedTuple):
    """By unroll step and trained row, [K, B, R]. known: there is a token to predict; chance: that the draft's first
    candidate is the target's token, if all draft tokens before it are.
    """

    known: jax.Array
    chance: jax.Array


class _Recorded(NamedTuple):
    """Of an unroll step, [B, R]: whether there is a token to predict, places, the draft's entry of the token or -1, its
    logits, [B, R, V'], and that of the entry, [B, R, 1].
    """

    known: jax.Array
    place: jax.Array
    token: jax.Array
    logits: jax.Array
    own: jax.Array


@dataclass(frozen=True)
class Objective:
    """The objective of an algorithm.

    unroll_steps: tokens that a row predicts
    decay: fraction of the rows of a step that the next step uses
    mixed_precision: multiply in bfloat16
    factor, softcap: of the target's logits

    For algorithms whose states imitate the target's, a row's loss includes their distance (smooth L1).
    """

    algorithm: Algorithm
    unroll_steps: int
    decay: float
    mixed_precision: bool
    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, params: Params, target: TargetWeights, batch: Batch) -> tuple[jax.Array, LossSums]:
        """The weighted sum over all rows, float32, and its parts."""
        params = wrapped(params) if self.mixed_precision else params
        head, p = self._head(params, target), self.target_distributions(target, batch)
        losses, counts = [], []
        rows = self._rows(batch)
        counted = jnp.ones(batch.rows.shape, bool)
        each = [math.ceil(rows * self.decay**k) for k in range(self.unroll_steps)]
        for k, step in enumerate(self._unrolled(params, target, batch, each)):
            inside = self._predicted_ids(target, batch, step.place) >= 0
            counted = counted[:, : each[k]] & (k < batch.reach[:, : each[k]]) & inside
            weights = counted.reshape(-1).astype(jnp.float32)
            states = step.state.reshape(len(weights), -1)
            beside = take(p, step.place).reshape(len(weights), -1)
            model = self.algorithm.model
            loss = cross_entropy(model.factor * states, head, beside, weights, model.softcap)
            if self.algorithm.state_loss_weight:
                final = take(self._final(target, batch), step.place).reshape(states.shape)
                loss += self.algorithm.state_loss_weight * jnp.sum(weights * _smooth_distance(states - final))
            losses.append(loss)
            counts.append(weights.sum())
        sums = LossSums(jnp.stack(losses), jnp.stack(counts))
        return sums.losses.sum(), sums

    def rank_tokens(self, params: Params, target: TargetWeights, batch: Batch) -> TokenRanks:
        """Ranks of the recorded tokens, as greedy drafting would see them."""
        known, ranks = [], []
        for one in self._recorded(params, target, batch):
            better = jnp.sum(one.logits > one.own, axis=-1)
            known.append(one.known)
            ranks.append(jnp.where(one.token >= 0, better, one.logits.shape[-1]))
        return TokenRanks(jnp.stack(known), jnp.stack(ranks))

    def match_chances(self, params: Params, target: TargetWeights, batch: Batch) -> TokenChances:
        """Probabilities that draft tokens along the recorded text are the target's.

        Greedy answers: 1 where the recorded token is the first candidate, else 0. Sampled ones: d, the total variation
        distance between the two distributions, gives the least probability with coupled noise, (1 - d) / (1 + d); 0
        where the draft has no entry for the recorded token. Whether one sample matched would say far less.
        """
        p, model = self.target_distributions(target, batch), self.algorithm.model
        known, chances = [], []
        for one in self._recorded(params, target, batch, model.softcap, model.factor):
            first = jnp.all(one.logits <= one.own, axis=-1).astype(jnp.float32)
            beside = take(p, one.place).astype(jnp.float32)
            common = jnp.sum(jnp.minimum(beside, jax.nn.softmax(one.logits, axis=-1)), axis=-1)
            chance = jnp.where(batch.sampled[:, : common.shape[1]], common / (2 - common), first)
            known.append(one.known)
            chances.append(jnp.where(one.token >= 0, chance, 0.0))
        return TokenChances(jnp.stack(known), jnp.stack(chances))

    def _recorded(
        self, params: Params, target: TargetWeights, batch: Batch, softcap: float | None = None, factor: float = 1.0
    ) -> Iterator[_Recorded]:
        """The recorded tokens and the draft's logits, by unroll step. Ranks need no softcap and factor."""
        params = wrapped(params) if self.mixed_precision else params
        head, rows = {"head": self._head(params, target)}, self._rows(batch)
        for k, step in enumerate(self._unrolled(params, target, batch, [rows] * self.unroll_steps)):
            token = self._predicted_ids(target, batch, step.place)
            logits = head_logits(head, step.state, 2**31 - 1, softcap, factor)
            own = jnp.take_along_axis(logits, jnp.maximum(token, 0)[..., None], axis=-1)
            yield _Recorded(k < batch.reach[:, :rows], step.place, token, logits, own)

    def _unrolled(
        self, params: Params, target: TargetWeights, batch: Batch, each: Sequence[int]
    ) -> Iterator[UnrollStep]:
        feature = self.algorithm.feature(params, batch.states.astype(jnp.float32))
        model = self.algorithm.model
        compute = unroll_block if isinstance(model.head, BlockHead) else unroll
        return compute(model, params, params.get("embed", target.embed), feature, batch, each)

    def _rows(self, batch: Batch) -> int:
        """Rows of a pack that are trained, the first ones."""
        rows: int = batch.rows.shape[1]
        return math.ceil(rows * self.algorithm.row_share)

    def _head(self, params: Params, target: TargetWeights) -> Any:
        """The matrix of the logits, the draft's or the target's."""
        own = self.algorithm.head(params)
        own = target.head if own is None else own
        if self.mixed_precision:
            return own if isinstance(own, MixedPrecisionWeight) else MixedPrecisionWeight(own)
        return own.astype(jnp.float32)

    def _final(self, target: TargetWeights, batch: Batch) -> jax.Array:
        """The target's last states, [B, L, Ht]."""
        final: jax.Array = batch.states[..., -target.head.shape[0] :]
        return final

    def _predicted_ids(self, target: TargetWeights, batch: Batch, place: jax.Array) -> jax.Array:
        """The draft's entry of the token behind each row, [B, R]; -1 without one."""
        return target.draft_ids[jnp.take_along_axis(batch.tokens, place, axis=1)]

    def target_distributions(self, target: TargetWeights, batch: Batch) -> jax.Array:
        """The target's distributions at all places, [B, L, V']."""
        multiply = bf16_dot if self.mixed_precision else _exact
        logits = self.factor * multiply(self._final(target, batch), target.head)
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        p = jax.nn.softmax(logits, axis=-1)
        return p.astype(jnp.bfloat16) if self.mixed_precision else p


def _smooth_distance(difference: jax.Array) -> jax.Array:
    """Mean of smooth L1 (Huber) over the numbers of each row. difference: [N, H]."""
    size = jnp.abs(difference)
    return jnp.mean(jnp.where(size < 1, 0.5 * size**2, size - 0.5), axis=-1)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))


def wrapped(params: Params) -> Params:
    """The same parameters with matrices that are multiplied in bfloat16.

    Embeddings are only looked up; a router's choice of experts is computed exactly.
    """

    def wrap(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf if leaf.ndim != 2 or path[-1].key in _EXACT else MixedPrecisionWeight(leaf)

    found: Params = jax.tree_util.tree_map_with_path(wrap, params)
    return found
