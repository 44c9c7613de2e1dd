"""Packs of records: the arrays that a step of the training sees, of few shapes, so that few programs are compiled.

A pack is a row of `length` places that holds several records, one behind the other. Place i of a record holds the
target's states at its token i. The row there is paired with token i + 1 in fed heads, and says the token after it; in
other decoders it is paired with token i itself, and says the next one. Rows that have something to say are *learnt
rows*; a pack has room for `learnt` of them, in random order, and only these pay for queries and logits. A record with
more of them brings a random part.

The longer a pack, the less of it stays empty; but attention costs its length, so long records have packs of their own,
twice as long, and again.

Which records share a pack depends on the seed, the epoch and the records' lengths alone, so that a run that goes on
sees what it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from services.draft.learning.store import Reader

_OPEN = 64  # packs that are filled at a time
_LEAST_LENGTH = 768
_MANY = 4  # packs; with fewer records they are no longer than the longest record
_ROUND = 16
_FILL = 0.9


class Batch(NamedTuple):
    """B packs of L places and R learnt rows; K tokens ahead.

    states: [B, L, W] bfloat16; tokens: [B, L + K + 1] int32, those behind the places, zeros behind the last; inputs:
    alike, those that rows are paired with; positions, segments:
    [B, L] int32, segments counted from 1, 0 where there is nothing; rows: [B, R] int32, places of learnt rows; reach:
    [B, R] int32, tokens ahead whose distribution is known, 0 for padding; sampled: [B, R] bool, not greedy
    """

    states: Any
    tokens: Any
    inputs: Any
    positions: Any
    segments: Any
    rows: Any
    reach: Any
    sampled: Any


@dataclass(frozen=True)
class PackShape:
    """Sizes of a batch: packs, places and learnt rows of a pack, tokens that a row looks ahead.

    fed: rows are those of a fed head
    """

    packs: int
    length: int
    learnt: int
    ahead: int
    fed: bool = True


def learnt_rows(entries: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each record the first learnt row and the number of them, [n] each.

    The token behind the prompt never needs a draft: it comes with the prompt. The last place's state tells what follows
    it, but no row is known that would foretell that.
    """
    first = np.maximum(entries["first"].astype(np.int64) - 1, 0)
    return first, np.maximum(entries["rows"].astype(np.int64) - 1 - first, 0)


def shapes_of(
    entries: NDArray[Any], rows: int, ahead: int, fed: bool = True
) -> list[tuple[PackShape, NDArray[np.int64]]]:
    """Shapes that fit the records, and the indices of those that each is for. rows: learnt rows of a batch, about.

    Raises ConfigError if there is nothing to learn.
    """
    counts = learnt_rows(entries)[1]
    if not counts.any():
        raise ConfigError("no answer was written that could be learnt from; is --max-new-tokens too small?")
    shapes: list[tuple[PackShape, NDArray[np.int64]]] = []
    left, most = np.flatnonzero(counts), _LEAST_LENGTH
    longest = -(-int(entries["rows"].max()) // _ROUND) * _ROUND
    while len(left):
        many = entries["rows"][left].sum() > _MANY * most
        length = most if many else min(most, longest)
        fits = entries["rows"][left] <= length
        here, left = left[fits], left[~fits]
        if len(here):
            # With a little less room than the average needs hardly any of it stays empty; some places do instead.
            share = counts[here].sum() / entries["rows"][here].sum()
            learnt = min(-(-int(_FILL * share * length) // _ROUND) * _ROUND, length)
            shapes.append((PackShape(max(1, round(rows / learnt)), length, learnt, ahead, fed), here))
        most *= 2
    return shapes


def plan(
    entries: NDArray[Any], indices: NDArray[np.int64], shape: PackShape, order: np.random.Generator
) -> list[list[int]]:
    """Which records share a pack, in random order: each one goes into the fullest open pack that has room for it."""
    counts = np.minimum(learnt_rows(entries)[1], shape.learnt)
    packs: list[list[int]] = []
    open_packs: list[tuple[list[int], int, int]] = []
    for index in order.permutation(indices).tolist():
        size, learnt = int(entries["rows"][index]), int(counts[index])
        fitting = [
            i
            for i, (_, used, rows) in enumerate(open_packs)
            if used + size <= shape.length and rows + learnt <= shape.learnt
        ]
        if not fitting and len(open_packs) == _OPEN:
            fullest = max(range(_OPEN), key=lambda i: open_packs[i][2])
            packs.append(open_packs.pop(fullest)[0])
        if fitting:
            best = max(fitting, key=lambda i: open_packs[i][2])
            pack, used, rows = open_packs[best]
            open_packs[best] = ([*pack, index], used + size, rows + learnt)
        else:
            open_packs.append(([index], size, learnt))
    packs += [pack for pack, _, _ in open_packs]
    return [packs[i] for i in order.permutation(len(packs))]


def build(reader: Reader, packs: Sequence[Sequence[int]], shape: PackShape, order: np.random.Generator) -> Batch:
    """The arrays of some packs; those that are missing are empty."""
    count, width, places = shape.packs, reader.row_bytes // 2, shape.length

    def ints(columns: int) -> NDArray[np.int32]:
        return np.zeros((count, columns), np.int32)

    batch = Batch(
        np.zeros((count, places, width), ml_dtypes.bfloat16), ints(places + shape.ahead + 1),
        ints(places + shape.ahead + 1), ints(places), ints(places), ints(shape.learnt), ints(shape.learnt),
        np.zeros((count, shape.learnt), bool),
    )  # fmt: skip
    for b, pack in enumerate(packs):
        place, chosen = 0, []
        for number, index in enumerate(pack, start=1):
            entry, rows = reader.entries[index], reader.rows(index)
            size, first = len(rows), max(int(entry["first"]) - 1, 0)
            here = slice(place, place + size)
            batch.states[b, here] = np.ascontiguousarray(rows).view(ml_dtypes.bfloat16)
            tokens = reader.tokens(index)
            batch.tokens[b, here] = tokens[1 : size + 1]
            batch.inputs[b, here] = tokens[1 : size + 1] if shape.fed else tokens[:size]
            batch.positions[b, here] = np.arange(size)
            batch.segments[b, here] = number
            own = np.arange(first, size - 1)
            if len(own) > shape.learnt:
                own = order.choice(own, shape.learnt, replace=False)
            chosen.append(
                np.stack([place + own + (not shape.fed), size - 1 - own, np.full(len(own), entry["temperature"] > 0)])
            )
            place += size
        mixed = np.concatenate(chosen, axis=1)
        mixed = mixed[:, order.permutation(mixed.shape[1])]
        for array, row in zip((batch.rows, batch.reach, batch.sampled), mixed, strict=True):
            array[b, : len(row)] = row
    return batch


class Batches:
    """Batches without end, epoch after epoch. epoch: of them; learnt: rows of an epoch."""

    def __init__(
        self, reader: Reader, indices: Sequence[int], rows: int, ahead: int, seed: int, fed: bool = True
    ) -> None:
        """rows, ahead, fed: as of `shapes_of`. Raises ConfigError if there is nothing to learn."""
        self._reader, self._seed = reader, seed
        chosen = np.asarray(indices, np.int64)
        self.shapes = [(shape, chosen[own]) for shape, own in shapes_of(reader.entries[chosen], rows, ahead, fed)]
        plans = self._epoch(0)
        self.epoch = len(plans)
        counts = learnt_rows(reader.entries)[1]
        self.learnt = sum(int(np.minimum(counts[own], shape.learnt).sum()) for shape, own in self.shapes)

    def _epoch(self, number: int) -> list[tuple[PackShape, list[list[int]]]]:
        order = np.random.default_rng([self._seed, number])
        groups: list[tuple[PackShape, list[list[int]]]] = []
        for shape, own in self.shapes:
            packs = plan(self._reader.entries, own, shape, order)
            groups += [(shape, packs[i : i + shape.packs]) for i in range(0, len(packs), shape.packs)]
        return [groups[i] for i in order.permutation(len(groups))]

    def since(self, batch: int) -> Iterator[Batch]:
        """Batches from number `batch` on."""
        epoch, start = divmod(batch, self.epoch)
        while True:
            groups = self._epoch(epoch)
            # Epochs may differ a little in the number of their packs; all count as the first.
            for i in range(start, self.epoch):
                shape, packs = groups[i % len(groups)]
                yield build(self._reader, packs, shape, np.random.default_rng([self._seed, epoch, i]))
            epoch, start = epoch + 1, 0
