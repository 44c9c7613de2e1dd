"""What a kernel must know of a ragged batch, as a few tables of integers that NumPy fills for all sessions at once.

    span   rows of one session                      tile   neighbouring rows of a span that one program attends for
    split  SPLIT keys of a session, by position     item   a tile and the splits that one program takes

A row's result is a fold over the splits that it sees, in order. Each split is computed alone, so the bits of the result
do not depend on whether one program folds all splits of a tile or several programs leave partial results that are
folded later; which of the two is done follows the load. As splits lie at fixed positions and a tile's height is fixed
too, a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.tree import ROOT
from services.target.layout import Span

Ints = NDArray[np.int32]

# Columns of the tables.
#   tile: first row in the batch; rows; place of the first row in its span; keys in the cache before the span; key of
#         the span's first node; first entry in `pages`; first entry in `words`; first key that is seen; first key that
#         is looked up in `paths`, and where it stands there
#   item: tile; first split; split behind the last; first partial row, or -1 if the item is its tile's only one
#   fold: first partial row; partial rows between splits; splits (0: the row has its result)
TILE_COLUMNS, ITEM_COLUMNS, FOLD_COLUMNS = 10, 4, 3
_NO_PATH = np.iinfo(np.int32).max
_WORD_BITS = 32
# Programs that a device should have to do, as a multiple of those that it runs at once, before tiles stay whole.
_ROUNDS = 2


@dataclass(frozen=True)
class Load:
    """How a device likes its work. programs: run at once; partial_rows, items: room for those beyond one a tile."""

    programs: int
    partial_rows: int
    items: int = 1 << 20


@dataclass(frozen=True)
class Tables:
    """Items of a batch for the layers that share a height of tiles and a window. items: costliest first."""

    tiles: Ints  # [tiles, 10]
    items: Ints  # [items, 4]
    folds: Ints  # [T, 3]
    partial_rows: int


class Ragged:
    """The spans of a batch as arrays, in pieces that tiles are cut from. S spans, T rows. Rows of padding see nothing.

    A piece is a span. Or, where keys shall be visited in the order of a row's own path, as plain decoding does, it is a
    span up to the last node of a chain, and each of its other nodes, which then looks like a plain row: `paths` says
    where the keys of its path lie, as positions in its span's pages.
    """

    def __init__(self, spans: Sequence[Span], node_words: int | None = None, *, ordered: bool = False) -> None:
        """node_words: words of bits a node; by default as many as the largest draft needs. ordered: see above."""
        nodes = _column([span.nodes for span in spans])
        self.node_words = node_words or words_for(int(nodes.max()))
        self.words = ancestor_words([span.parents for span in spans if span.nodes], self.node_words)
        self.positions = np.concatenate([span.positions for span in spans])
        self.pages: Ints = np.concatenate([span.pages for span in spans])
        paths: list[int] = []
        pieces: list[tuple[int, ...]] = []
        page = word = 0
        for span in spans:
            pieces += _pieces(span, page, word, paths, ordered=ordered)
            page += len(span.pages)
            word += span.nodes * self.node_words
        self.paths = np.array(paths, np.int32)
        columns = np.array(pieces, np.int64).T
        self.first, self.rows, self.start, self.own = columns[:4]
        self.first_page, self.first_word, self.path_key, self.first_path = columns[4:]

    def tables(self, height: int, window: int | None, split: int, load: Load, programs_per_item: int) -> Tables:
        """Lay out the work. height: rows a tile; window: keys seen back, in positions; split: keys."""
        count = -(-self.rows // height)
        span = np.repeat(np.arange(len(count)), count)
        place = (np.arange(len(span)) - np.repeat(_starts(count), count)) * height
        rows = np.minimum(height, self.rows[span] - place)
        first_row = self.first[span] + place
        end = np.maximum(self.start[span] + place + rows, 0)
        low = np.zeros(len(span), np.int64)
        if window is not None:
            low = np.maximum(np.minimum.reduceat(self.positions, first_row) - window + 1, 0)
        columns = (
            first_row, rows, place, self.start[span], self.own[span], self.first_page[span], self.first_word[span], low,
            self.path_key[span], self.first_path[span],
        )  # fmt: skip
        tiles = np.stack(columns, axis=1).astype(np.int32)
        first, stop = low // split, -(-end // split)
        first = np.minimum(first, stop)
        shared = _shared(rows, stop - first, load, programs_per_item)
        partial = np.where(shared, rows * (stop - first), 0)
        base = _starts(partial)
        return Tables(tiles, _items(first, stop, rows, base, shared), _folds(first, stop, rows, base, shared),
                      int(partial.sum()))  # fmt: skip


def _pieces(span: Span, page: int, word: int, paths: list[int], *, ordered: bool) -> Iterator[tuple[int, ...]]:
    """Columns of a span's pieces; adds to `paths`. page, word: the first of the span in `pages` and `words`."""
    if span.inert:  # starts so far below zero that its rows end before the first key
        yield span.first, span.rows, -span.rows, -span.rows, page, word, _NO_PATH, 0
        return
    own = span.start + span.committed
    scattered = np.flatnonzero(span.parents != np.arange(-1, span.nodes - 1)) if ordered else ()
    first = int(scattered[0]) if len(scattered) else span.nodes
    yield span.first, span.committed + first, span.start, own, page, word, _NO_PATH, 0
    for node in range(first, span.nodes):
        row = span.committed + node
        position = int(span.positions[row])
        yield span.first + row, 1, position, position + 1, page, word, own, len(paths)
        path = [node]
        while (parent := int(span.parents[path[-1]])) != ROOT:
            path.append(parent)
        paths.extend(own + ancestor for ancestor in reversed(path))


def _column(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def words_for(nodes: int) -> int:
    """Words that hold a bit for each of some nodes; at least 1."""
    return max(1, -(-nodes // _WORD_BITS))


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of consecutive runs begins."""
    return np.cumsum(counts) - counts


def ancestor_words(drafts: Sequence[Ints], width: int) -> Ints:
    """Which nodes each node sees, itself and its ancestors, as bits: node i of a draft is bit i % 32 of word i // 32.

    drafts: parents [N] of each session, before their children; ROOT for none. Returns [all N, width] int32.
    """
    sizes = np.array([len(parents) for parents in drafts], dtype=np.int64)
    total = int(sizes.sum())
    words = np.zeros((total + 1, width), np.uint32)  # behind the nodes, one that sees nothing
    if total:
        parents = np.concatenate(drafts).astype(np.int64)
        begin = np.repeat(_starts(sizes), sizes)
        local = np.arange(total) - begin
        words[np.arange(total), local // _WORD_BITS] = np.uint32(1) << (local % _WORD_BITS).astype(np.uint32)
        above = np.append(np.where(parents == ROOT, total, parents + begin), total)
        while (above != total).any():  # what is seen 1, 2, 4, ... levels up
            words |= words[above]
            above = above[above]
    return words[:total].view(np.int32)


def _shared(
    rows: NDArray[np.int64], splits: NDArray[np.int64], load: Load, programs_per_item: int
) -> NDArray[np.bool_]:
    """Which tiles several programs share: those with more splits than a program's fair part, if there is room."""
    fair = max(1, int(splits.sum()) * programs_per_item // (_ROUNDS * load.programs))
    while True:
        shared = splits > fair
        if int((rows * splits)[shared].sum()) <= load.partial_rows and int(splits[shared].sum()) <= load.items:
            return shared
        fair *= 2


def _items(
    first: NDArray[np.int64], stop: NDArray[np.int64], rows: NDArray[np.int64], base: NDArray[np.int64],
    shared: NDArray[np.bool_],
) -> Ints:  # fmt: skip
    splits = stop - first
    count = np.where(shared, splits, 1)
    tile = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(tile)) - np.repeat(_starts(count), count)
    alone = ~shared[tile]
    begin = first[tile] + nth
    end = np.where(alone, stop[tile], begin + 1)
    partial = np.where(alone, -1, base[tile] + nth * rows[tile])
    items = np.stack([tile, begin, end, partial], axis=1).astype(np.int32)
    return items[np.argsort(begin - end, kind="stable")]


def _folds(
    first: NDArray[np.int64], stop: NDArray[np.int64], rows: NDArray[np.int64], base: NDArray[np.int64],
    shared: NDArray[np.bool_],
) -> Ints:  # fmt: skip
    tile = np.repeat(np.arange(len(rows)), rows)
    nth = np.arange(len(tile)) - np.repeat(_starts(rows), rows)
    folds = np.stack([base[tile] + nth, rows[tile], (stop - first)[tile]], axis=1)
    return np.where(shared[tile, None], folds, 0).astype(np.int32)
