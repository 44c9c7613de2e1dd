"""Packed training batches of a few fixed shapes, so that few programs are compiled.

A pack is an array of `length` places that holds several records, one behind the other. Place i of a record holds the
target's states at its token i. In feature-based heads the row there is paired with token i + 1 and predicts the token
after it; in other decoders it is paired with token i and predicts the next one. Rows with a token to predict are
*trained rows*; a pack has room for `learnt` of them, in random order, and only they need queries and logits. Of a
record with more of them a random subset is used.

Longer packs leave fewer places empty, but the cost of attention grows with their length. Long records therefore have
packs of their own, of twice the length, and so on.

The records of a pack depend only on the seed, the epoch and the lengths of the records, so that a resumed run sees the
same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from services.draft.learning.records.store import Reader

_MAX_OPEN = 64  # packs that are filled at a time
_MIN_LENGTH = 768
_MANY = 4  # packs; with fewer records they are no longer than the longest record
_MULTIPLE = 16  # of lengths
_FILL = 0.9


class Batch(NamedTuple):
    """B packs of L places and R trained rows; K unroll steps.

    states:    [B, L, W] bfloat16, hidden states of the target; or [B, L] int32, their rows in resident.py
    tokens:    [B, L + K + 1] int32, the token behind each place; zeros behind the last
    inputs:    [B, L + K + 1] int32, the token that each row is paired with
    positions: [B, L] int32
    segments:  [B, L] int32, number of the record from 1; 0 for empty places
    rows:      [B, R] int32, places of trained rows
    reach:     [B, R] int32, unroll steps whose target distribution is known; 0 for padding
    sampled:   [B, R] bool, False for greedy answers
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
    """Sizes of a batch: packs, places and trained rows of a pack, unroll steps.

    uses_features: rows are those of a feature-based head
    """

    packs: int
    length: int
    learnt: int
    unroll_steps: int
    uses_features: bool = True


def learnt_rows(entries: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first trained row of each record and the number of them, [n] each.

    The token behind the prompt needs no draft: the target samples it with the prompt. The last place's state gives the
    distribution of the token behind it, but no row predicts that token.
    """
    first = np.maximum(entries["first"].astype(np.int64) - 1, 0)
    return first, np.maximum(entries["rows"].astype(np.int64) - 1 - first, 0)


def shapes_of(
    entries: NDArray[Any], rows: int, unroll_steps: int, uses_features: bool = True
) -> list[tuple[PackShape, NDArray[np.int64]]]:
    """Shapes that fit the records, with the indices of the records for each. rows: trained rows of a batch, about.

    Raises ConfigError if there is nothing to train on.
    """
    counts = learnt_rows(entries)[1]
    if not counts.any():
        raise ConfigError("no answer has tokens to train on; --max-new-tokens may be too small")
    shapes: list[tuple[PackShape, NDArray[np.int64]]] = []
    left, most = np.flatnonzero(counts), _MIN_LENGTH
    longest = -(-int(entries["rows"].max()) // _MULTIPLE) * _MULTIPLE
    while len(left):
        many = entries["rows"][left].sum() > _MANY * most
        length = most if many else min(most, longest)
        fits = entries["rows"][left] <= length
        here, left = left[fits], left[~fits]
        if len(here):
            # Slightly less room than the average needs leaves hardly any trained row empty, but some places.
            share = counts[here].sum() / entries["rows"][here].sum()
            learnt = min(-(-int(_FILL * share * length) // _MULTIPLE) * _MULTIPLE, length)
            shapes.append((PackShape(max(1, round(rows / learnt)), length, learnt, unroll_steps, uses_features), here))
        most *= 2
    return shapes


def plan(
    entries: NDArray[Any], indices: NDArray[np.int64], shape: PackShape, order: np.random.Generator
) -> list[list[int]]:
    """Pack records, in random order: each one goes into the fullest open pack that has room for it."""
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
        if not fitting and len(open_packs) == _MAX_OPEN:
            fullest = max(range(_MAX_OPEN), key=lambda i: open_packs[i][2])
            packs.append(open_packs.pop(fullest)[0])
        if fitting:
            best = max(fitting, key=lambda i: open_packs[i][2])
            pack, used, rows = open_packs[best]
            open_packs[best] = ([*pack, index], used + size, rows + learnt)
        else:
            open_packs.append(([index], size, learnt))
    packs += [pack for pack, _, _ in open_packs]
    return [packs[i] for i in order.permutation(len(packs))]


class RecordSource(Protocol):
    """Records by index, on disk or in memory. entries: structured array with rows, first and temperature."""

    entries: NDArray[Any]
    row_bytes: int

    def tokens(self, index: int) -> NDArray[np.uint32]:
        """The tokens of a record, one more than its rows or more."""

    def rows(self, index: int) -> NDArray[np.uint8]:
        """The hidden states of a record, [m, row bytes]."""


class StatesOnDevice(Protocol):
    """States of records in the memory of a device (resident.py)."""

    starts: NDArray[np.int64]

    def fill(self, batch: Batch) -> Batch:
        """A batch with the states that its rows name."""


def build(
    reader: RecordSource,
    packs: Sequence[Sequence[int]],
    shape: PackShape,
    order: np.random.Generator,
    starts: NDArray[np.int64] | None = None,
) -> Batch:
    """The arrays of some packs; missing packs are empty. starts: of each record's resident states, if they are."""
    count, width, places = shape.packs, reader.row_bytes // 2, shape.length

    def ints(columns: int) -> NDArray[np.int32]:
        return np.zeros((count, columns), np.int32)

    states = ints(places) if starts is not None else np.zeros((count, places, width), ml_dtypes.bfloat16)
    batch = Batch(
        states, ints(places + shape.unroll_steps + 1),
        ints(places + shape.unroll_steps + 1), ints(places), ints(places), ints(shape.learnt), ints(shape.learnt),
        np.zeros((count, shape.learnt), bool),
    )  # fmt: skip
    for b, pack in enumerate(packs):
        place, chosen = 0, []
        for number, index in enumerate(pack, start=1):
            entry = reader.entries[index]
            size, first = int(entry["rows"]), max(int(entry["first"]) - 1, 0)
            here = slice(place, place + size)
            if starts is not None:
                batch.states[b, here] = starts[index] + np.arange(size)
            else:
                batch.states[b, here] = np.ascontiguousarray(reader.rows(index)).view(ml_dtypes.bfloat16)
            tokens = reader.tokens(index)
            batch.tokens[b, here] = tokens[1 : size + 1]
            batch.inputs[b, here] = tokens[1 : size + 1] if shape.uses_features else tokens[:size]
            batch.positions[b, here] = np.arange(size)
            batch.segments[b, here] = number
            own = np.arange(first, size - 1)
            if len(own) > shape.learnt:
                own = order.choice(own, shape.learnt, replace=False)
            chosen.append(
                np.stack(
                    [
                        place + own + (not shape.uses_features),
                        size - 1 - own,
                        np.full(len(own), entry["temperature"] > 0),
                    ]
                )
            )
            place += size
        mixed = np.concatenate(chosen, axis=1)
        mixed = mixed[:, order.permutation(mixed.shape[1])]
        for array, row in zip((batch.rows, batch.reach, batch.sampled), mixed, strict=True):
            array[b, : len(row)] = row
    return batch


class Batches:
    """Batches without end, epoch after epoch. epoch: batches of an epoch; learnt: trained rows of an epoch.

    resident: states that are on the device already; None if batches contain theirs
    """

    resident: StatesOnDevice | None = None

    def __init__(
        self,
        reader: Reader,
        indices: Sequence[int],
        rows: int,
        unroll_steps: int,
        seed: int,
        uses_features: bool = True,
    ) -> None:
        """rows, unroll_steps, fed: as of `shapes_of`. Raises ConfigError if there is nothing to train on."""
        self._reader, self._seed = reader, seed
        chosen = np.asarray(indices, np.int64)
        self.shapes = [
            (shape, chosen[own]) for shape, own in shapes_of(reader.entries[chosen], rows, unroll_steps, uses_features)
        ]
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
            # Epochs may differ slightly in their number of packs; all have the length of the first.
            for i in range(start, self.epoch):
                shape, packs = groups[i % len(groups)]
                order, resident = np.random.default_rng([self._seed, epoch, i]), self.resident
                if resident is None:
                    yield build(self._reader, packs, shape, order)
                else:
                    yield resident.fill(build(self._reader, packs, shape, order, resident.starts))
            epoch, start = epoch + 1, 0
