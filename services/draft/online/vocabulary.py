"""The draft's vocabulary follows the traffic: tokens that it lacks take the places of tokens that do not occur.

A head with fewer entries than the target has tokens never gets behind a token without an entry, so other traffic, such
as another language, shortens its drafts however well it learns. Only the mapping and columns of the head change, so
that programs are reused. A new column is the mean of those of the tokens that are nearest in the target's head. The
target's own column would not do: a trained head is turned against the target's, and has a large component in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from services.draft.learning.optimize import TrainState

_MIN_COUNT = 2  # occurrences of a token in stored answers before it gets an entry
_NEAREST = 8  # tokens whose columns are averaged
_MAX_PART = 50  # of the entries, at most one in this many is exchanged at a time


class Exchange(NamedTuple):
    """Entries that are exchanged and their new tokens, [n]. Truthy unless empty."""

    entries: NDArray[np.int64]
    tokens: NDArray[np.int64]

    def __bool__(self) -> bool:
        return len(self.entries) > 0


def token_counts(answers: Iterable[NDArray[np.uint32]], vocab_size: int) -> NDArray[np.int64]:
    """How often each token occurs."""
    counts = np.zeros(vocab_size, np.int64)
    for answer in answers:
        counts += np.bincount(answer, minlength=vocab_size)[:vocab_size]
    return counts


def exchange(ids: NDArray[np.int64], counts: NDArray[np.int64], kept: Iterable[int]) -> Exchange:
    """The most frequent tokens without an entry, for entries whose tokens do not occur.

    ids: the target's id of each entry; kept: tokens that keep their entries. Of tokens that do not occur those with the
    greatest ids go first, because byte-pair encodings number tokens by falling frequency.
    """
    inside = np.zeros(len(counts), bool)
    inside[ids] = True
    wanted = np.flatnonzero((counts >= _MIN_COUNT) & ~inside)
    wanted = wanted[np.argsort(-counts[wanted], kind="stable")][: max(1, len(ids) // _MAX_PART)]
    free = np.flatnonzero((counts[ids] == 0) & ~np.isin(ids, list(kept)))
    free = free[np.argsort(-ids[free])][: len(wanted)]
    return Exchange(free, wanted[: len(free)])


def exchanged_ids(ids: NDArray[np.int64], change: Exchange) -> NDArray[np.int64]:
    """The target's id of each entry afterwards."""
    ids = ids.copy()
    ids[change.entries] = change.tokens
    return ids


def exchanged_state(state: TrainState, change: Exchange, known: NDArray[Any], wanted: NDArray[Any]) -> TrainState:
    """The state of a training afterwards. known, wanted: the target's head for the entries before and after."""
    head = np.array(state.params["head"])
    near = _nearest(known, wanted[:, change.entries], change.entries)
    head[:, change.entries] = head[:, near].mean(axis=2)

    def cleared(path: tuple[Any, ...], leaf: Any) -> Any:
        if getattr(path[-1], "key", None) != "head" or leaf.shape != head.shape:
            return leaf
        moments = np.array(leaf)
        moments[:, change.entries] = 0
        return jnp.asarray(moments)

    moments = jax.tree_util.tree_map_with_path(cleared, state.moments)
    return TrainState(state.params | {"head": jnp.asarray(head)}, moments)


def _nearest(known: NDArray[Any], columns: NDArray[Any], excluded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Entries whose columns of the target's head have the smallest angles to others, [n, k]. columns: [Ht, n]."""
    known, columns = (array.astype(np.float32) for array in (known, columns))
    cosines = columns.T @ (known / np.maximum(np.linalg.norm(known, axis=0), 1e-6))
    cosines[:, excluded] = -np.inf
    count = min(_NEAREST, known.shape[1] - len(excluded))
    found: NDArray[np.int64] = np.argpartition(-cosines, count - 1, axis=1)[:, :count]
    return found
