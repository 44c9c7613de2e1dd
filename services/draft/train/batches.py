"""Packs of records: the arrays that a step of the training sees, all of one shape, so that one program is compiled.

A pack is a row of `length` places that holds several records, one behind the other. Place i of a record holds the
target's states at its token i and is paired with token i + 1, as rows of a fed head are. Places from which the token
after next is to be foretold are *learnt rows*; a pack has room for `learnt` of them, and only these pay for queries and
logits.

Which records share a pack depends on the seed, the epoch and the records' lengths alone, so that a run that goes on
sees what it would have seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from services.draft.train.store import Reader

_OPEN = 16  # packs that are filled at a time
_ROUND = 64


class Batch(NamedTuple):
    """B packs of L places and R learnt rows; K tokens ahead.

    states: [B, L, W] bfloat16; tokens: [B, L + K + 1] int32, of places, zeros behind the last; positions, segments:
    [B, L] int32, segments counted from 1, 0 where there is nothing; rows: [B, R] int32, places of learnt rows; reach:
    [B, R] int32, tokens ahead whose distribution is known, 0 for padding; sampled: [B, R] bool, not greedy
    """

    states: Any
    tokens: Any
    positions: Any
    segments: Any
    rows: Any
    reach: Any
    sampled: Any


@dataclass(frozen=True)
class PackShape:
    """Sizes of a pack. ahead: tokens that a row looks ahead."""

    length: int
    learnt: int
    ahead: int


def learnt_rows(entries: NDArray[Any], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each record the first learnt row and the number of them, [n] each; a record is cut behind `length` places.

    The token behind the prompt never needs a draft: it comes with the prompt. The last place's state tells what follows
    it, but no row is known that would foretell that.
    """
    places = np.minimum(entries["rows"].astype(np.int64), length)
    first = np.maximum(entries["first"].astype(np.int64) - 1, 0)
    return first, np.maximum(places - 1 - first, 0)


def pack_shape(entries: NDArray[Any], length: int, ahead: int) -> PackShape:
    """Sizes that fit the records. length: places of a pack. Raises ConfigError if there is nothing to learn."""
    _, counts = learnt_rows(entries, length)
    if not len(counts) or counts.max() == 0:
        raise ConfigError("no answer was written that could be learnt from; is --max-new-tokens too small?")
    share = counts.sum() / np.minimum(entries["rows"], length).sum()
    learnt = max(math.ceil(1.05 * share * length), int(counts.max()))
    return PackShape(length, min(-(-learnt // _ROUND) * _ROUND, length), ahead)


def plan(
    entries: NDArray[Any], indices: Sequence[int], shape: PackShape, order: np.random.Generator
) -> list[list[int]]:
    """Which records share a pack, in random order: each one goes into the fullest open pack that has room for it."""
    _, counts = learnt_rows(entries, shape.length)
    places = np.minimum(entries["rows"].astype(np.int64), shape.length)
    packs: list[list[int]] = []
    open_packs: list[tuple[list[int], int, int]] = []
    for index in order.permutation(np.asarray(indices, np.int64)).tolist():
        size, learnt = int(places[index]), int(counts[index])
        if not learnt:
            continue
        fitting = [i for i, (_, used, rows) in enumerate(open_packs)
                   if used + size <= shape.length and rows + learnt <= shape.learnt]  # fmt: skip
        if not fitting and len(open_packs) == _OPEN:
            fullest = max(range(_OPEN), key=lambda i: open_packs[i][1])
            packs.append(open_packs.pop(fullest)[0])
        if fitting:
            best = max(fitting, key=lambda i: open_packs[i][1])
            pack, used, rows = open_packs[best]
            open_packs[best] = ([*pack, index], used + size, rows + learnt)
        else:
            open_packs.append(([index], size, learnt))
    packs += [pack for pack, _, _ in open_packs]
    return [packs[i] for i in order.permutation(len(packs))]


def build(reader: Reader, packs: Sequence[Sequence[int]], shape: PackShape) -> Batch:
    """The arrays of some packs."""
    count, width = len(packs), reader.row_bytes // 2
    places = shape.length

    def ints(columns: int) -> NDArray[np.int32]:
        return np.zeros((count, columns), np.int32)

    batch = Batch(
        np.zeros((count, places, width), ml_dtypes.bfloat16), ints(places + shape.ahead + 1), ints(places),
        ints(places), ints(shape.learnt), ints(shape.learnt), np.zeros((count, shape.learnt), bool),
    )  # fmt: skip
    firsts, counts = learnt_rows(reader.entries, shape.length)
    for b, pack in enumerate(packs):
        place = row = 0
        for number, index in enumerate(pack, start=1):
            rows, tokens = reader.rows(index)[:places], reader.tokens(index)
            size, learnt, first = len(rows), int(counts[index]), int(firsts[index])
            here = slice(place, place + size)
            batch.states[b, here] = np.ascontiguousarray(rows).view(ml_dtypes.bfloat16)
            batch.tokens[b, here] = tokens[1 : size + 1]
            batch.positions[b, here] = np.arange(size)
            batch.segments[b, here] = number
            own = first + np.arange(learnt)
            batch.rows[b, row : row + learnt] = place + own
            batch.reach[b, row : row + learnt] = size - 1 - own
            batch.sampled[b, row : row + learnt] = reader.entries["temperature"][index] > 0
            place, row = place + size, row + learnt
    return batch


class Batches:
    """Batches without end, epoch after epoch. packs: of a batch."""

    def __init__(self, reader: Reader, indices: Sequence[int], shape: PackShape, packs: int, seed: int) -> None:
        self._reader, self._indices, self._shape, self._packs, self._seed = reader, indices, shape, packs, seed
        self.epoch_batches = len(self._epoch(0))
        self.learnt = int(learnt_rows(reader.entries[np.asarray(indices)], shape.length)[1].sum())

    def _epoch(self, number: int) -> list[list[list[int]]]:
        packs = plan(self._reader.entries, self._indices, self._shape, np.random.default_rng([self._seed, number]))
        packs += packs[: -len(packs) % self._packs]  # the last batch is full, too
        packs = (packs * self._packs)[: max(len(packs), self._packs)]
        return [packs[i : i + self._packs] for i in range(0, len(packs) - self._packs + 1, self._packs)]

    def since(self, batch: int) -> Iterator[Batch]:
        """Batches from number `batch` on."""
        epoch, start = divmod(batch, self.epoch_batches)
        while True:
            groups = self._epoch(epoch)
            # Epochs differ a little in the number of their packs; all count as the first.
            for i in range(start, self.epoch_batches):
                yield build(self._reader, groups[i % len(groups)], self._shape)
            epoch, start = epoch + 1, 0
