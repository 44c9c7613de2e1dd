"""The draft's vocabulary follows the traffic: tokens that it lacks take the places of tokens that do not occur.

A head with fewer entries than the target has tokens never gets behind a token without an entry, so other traffic, such
as another language, shortens its drafts however well it learns. Only the mapping and columns of the head change, so
that programs are reused. A new column is the target's, scaled to the norm of the others.
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


def exchanged_state(state: TrainState, change: Exchange, columns: NDArray[np.float32]) -> TrainState:
    """The state of a training afterwards. columns: of the target's head for the new tokens, [H, n]."""
    head = np.array(state.params["head"])
    size = float(np.median(np.linalg.norm(head, axis=0)))
    head[:, change.entries] = columns * (size / np.maximum(np.linalg.norm(columns, axis=0), 1e-6))

    def cleared(path: tuple[Any, ...], leaf: Any) -> Any:
        if getattr(path[-1], "key", None) != "head" or leaf.shape != head.shape:
            return leaf
        moments = np.array(leaf)
        moments[:, change.entries] = 0
        return jnp.asarray(moments)

    moments = jax.tree_util.tree_map_with_path(cleared, state.moments)
    return TrainState(state.params | {"head": jnp.asarray(head)}, moments)
