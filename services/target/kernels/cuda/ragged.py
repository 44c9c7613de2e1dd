"""The tables that describe a ragged batch to the attention kernel, filled with NumPy for all sessions at once.

    span   rows of one session                      tile   adjacent rows of a span that one program computes
    split  some keys of a session, by position      item   a tile and the splits that one program computes

A row's result is a fold over the splits that it sees, in order. One program computes all splits of a tile, or several
programs store partial results that are folded later; the load decides. It also decides the size of splits, unless that
is fixed: then splits have fixed positions, each is computed separately, and because a tile's height is fixed too, the
bits of a row's result do not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outrider.paging.allocator import NULL_PAGE
from outrider.speculation.tree import ROOT
from services.target.step.layout import Layout, Span

Ints = NDArray[np.int32]

# Columns of the tables.
#   tile: first row in the batch; rows; place of the first row in its span; keys in the cache before the span; key of
#         the span's first node; first entry in `pages`; first entry in `words`; first key that is seen; first key that
#         is looked up in `paths`, and where it stands there; keys a split
#   item: tile; first split; split behind the last; first partial row, or -1 if the item is its tile's only one
#   fold: first partial row; partial rows between splits; splits (0: the row has its result)
TILE_COLUMNS, ITEM_COLUMNS, FOLD_COLUMNS = 11, 4, 3
_NO_PATH = np.iinfo(np.int32).max
_WORD_BITS = 32
# Tiles stay whole if there are at least this many programs for each one that the device runs at once.
_ROUNDS = 2
# Fixed cost of an item (2 us on an H200) and of a row's partial result, in keys of equal time.
_BEGINNING, _PARTIAL = 192, 4


@dataclass(frozen=True)
class Load:
    """Capacity of a device. programs: run at once; partial_rows, items: room for those beyond one a tile."""

    programs: int
    partial_rows: int
    items: int = 1 << 20


@dataclass(frozen=True)
class Split:
    """Fewest and most keys of a split; `most` is a multiple of `least`. If they are equal, splits are fixed.

    Splits get longer than `most` if their partial results would not fit.
    """

    least: int
    most: int

    @property
    def fixed(self) -> bool:
        """True if splits have fixed positions, so that a row's bits do not depend on the batch."""
        return self.least == self.most

    def under(self, load: Load, keys: NDArray[np.int64], rows: NDArray[np.int64], programs_per_item: int) -> int:
        """The split size with the earliest finish. keys, rows: [tiles], keys that a tile sees and its rows."""
        if self.fixed:
            return self.least
        blocks = -(-keys // self.least)  # the same for many steps
        order = np.argsort(-blocks, kind="stable")
        return _soonest(self, load, programs_per_item, blocks[order].tobytes(), rows[order].tobytes())


@lru_cache(maxsize=256)
def _soonest(split: Split, load: Load, programs_per_item: int, blocks: bytes, rows: bytes) -> int:
    """blocks: [tiles] int64, blocks of `least` keys that a tile sees, descending; rows: [tiles] int64."""
    counts, heights = np.frombuffer(blocks, np.int64), np.frombuffer(rows, np.int64)
    longest, most = max(int(counts[0]), 1), split.most // split.least
    fair = -(-int(counts.sum()) * programs_per_item // (_ROUNDS * load.programs))
    parts = -(-longest // max(1, min(fair, most // _ROUNDS // 2)))  # where shorter splits have nothing to balance
    sizes = sorted({min(-(-longest // count), most) for count in range(1, parts + 1)}, reverse=True)
    while not _has_room(counts, heights, sizes[0], load):
        sizes = [2 * sizes[0]]
    best, soonest = sizes[0], np.inf
    for size in sizes:
        if not _has_room(counts, heights, size, load):
            break
        beginning = _BEGINNING + _PARTIAL * int(heights[counts > size].max(initial=0))
        through = _through(counts, size, load.programs, programs_per_item, beginning / split.least)
        if through < soonest:
            best, soonest = size, through
    return split.least * best


def _has_room(counts: NDArray[np.int64], heights: NDArray[np.int64], size: int, load: Load) -> bool:
    """True if partial results fit with splits of `size` blocks. counts, heights: [tiles], blocks and rows."""
    parts = -(-counts // size)
    return int((parts * heights)[parts > 1].sum()) <= load.partial_rows


def _through(counts: NDArray[np.int64], size: int, programs: int, programs_per_item: int, beginning: float) -> float:
    """Finish time, in blocks, of the program that computes the costliest item of each round.

    counts: [tiles], descending; size: of a split, in blocks; beginning: fixed cost of an item, in blocks
    """
    whole, rest = int((counts // size).sum()), counts % size
    items = whole + int(np.count_nonzero(rest))
    costliest = np.arange(0, items * programs_per_item, programs) // programs_per_item  # of each round
    ends = np.sort(rest)[::-1][costliest[costliest >= whole] - whole]
    return size * (len(costliest) - len(ends)) + int(ends.sum()) + beginning * len(costliest)


@dataclass(frozen=True)
class Tables:
    """Items of a batch for the layers that share a height of tiles and a window. items: costliest first."""

    tiles: Ints  # [tiles, 11]
    items: Ints  # [items, 4]
    folds: Ints  # [T, 3]
    partial_rows: int


class Ragged:
    """The spans of a batch as arrays of pieces, which are cut into tiles. S spans, T rows. Rows of padding see no keys.

    A piece is a span. With `ordered`, keys are visited in the order of a row's own path, as in plain decoding: then a
    span up to the last node of its leading chain is a piece, and each other node is a piece that looks like a plain
    row, with the places of its path's keys in `paths`, as positions in its span's pages.
    """

    def __init__(
        self, layout: Layout, positions: NDArray[np.int64], node_words: int | None = None, *, ordered: bool = False
    ) -> None:
        """positions: [T], logical ones. node_words: words of bits a node; by default as many as the largest needs.

        ordered: see above
        """
        nodes = layout.nodes
        self.node_words = node_words or words_for(int(nodes.max()))
        self.words = ancestor_words(layout.parents, nodes, self.node_words)
        self.positions, self.pages, self.paths = positions, layout.pages, np.zeros(0, np.int32)
        self.slack: NDArray[np.int64] | None = None  # by which a span may begin later than its tables say
        words = _starts(nodes) * self.node_words
        if ordered:
            assert layout.slack is None, "the order of keys follows from the tree, which must be known"
            self._take_apart(layout.spans(positions), layout.table, words)
            return
        rows = np.diff(layout.first)
        inert = layout.pages[layout.table] == NULL_PAGE  # padding starts so far below 0 that it ends before any key
        self.slack = layout.slack
        self.first, self.rows, self.first_page, self.first_word = layout.first[:-1], rows, layout.table, words
        self.start = np.where(inert, -rows, layout.start)
        self.own = np.where(inert, -rows, layout.start + layout.committed)
        self.path_key, self.first_path = np.full(len(rows), _NO_PATH), np.zeros(len(rows), np.int64)

    def _take_apart(self, spans: Sequence[Span], pages: NDArray[np.int64], words: NDArray[np.int64]) -> None:
        """Pieces of spans. pages, words: where those of each span begin."""
        paths: list[int] = []
        pieces: list[tuple[int, ...]] = []
        for span, page, word in zip(spans, pages.tolist(), words.tolist(), strict=True):
            pieces += _pieces(span, page, word, paths)
        self.paths = np.array(paths, np.int32)
        columns = np.array(pieces, np.int64).T
        self.first, self.rows, self.start, self.own = columns[:4]
        self.first_page, self.first_word, self.path_key, self.first_path = columns[4:]

    def tables(self, height: int, window: int | None, split: Split, load: Load, programs_per_item: int) -> Tables:
        """Lay out the work. height: rows a tile; window: keys seen back, in positions."""
        if (self.rows <= height).all():
            span, place, rows = np.arange(len(self.rows)), np.zeros(len(self.rows), np.int64), self.rows
        else:
            count = -(-self.rows // height)
            span = np.repeat(np.arange(len(count)), count)
            place = (np.arange(len(span)) - np.repeat(_starts(count), count)) * height
            rows = np.minimum(height, self.rows[span] - place)
        first_row = self.first[span] + place
        end = np.maximum(self.start[span] + place + rows, 0)
        if self.slack is not None:  # items cover what the span may see; the kernel stops at what it does see
            end += self.slack[span]
        low = np.zeros(len(span), np.int64)
        if window is not None:
            low = np.maximum(np.minimum.reduceat(self.positions, first_row) - window + 1, 0)
        keys = split.under(load, np.maximum(end - low, 0), rows, programs_per_item)
        columns = (
            first_row, rows, place, self.start[span], self.own[span], self.first_page[span], self.first_word[span], low,
            self.path_key[span], self.first_path[span], np.full(len(span), keys),
        )  # fmt: skip
        tiles = _table(columns)
        first, stop = low // keys, -(-end // keys)
        first = np.minimum(first, stop)
        splits = stop - first
        fair = int(splits.sum()) * programs_per_item // (_ROUNDS * load.programs) if split.fixed else 1
        shared = _shared(rows, splits, load, max(fair, 1))
        partial = np.where(shared, rows * splits, 0)
        base = _starts(partial)
        items = _items(first, stop, rows, base, shared, (low, end), keys)
        return Tables(tiles, items, _folds(first, stop, rows, base, shared), int(partial.sum()))


def _pieces(span: Span, page: int, word: int, paths: list[int]) -> Iterator[tuple[int, ...]]:
    """Columns of a span's pieces; adds to `paths`. page, word: the first of the span in `pages` and `words`."""
    if span.is_padding:
        yield span.first, span.rows, -span.rows, -span.rows, page, word, _NO_PATH, 0
        return
    own = span.start + span.committed
    scattered = np.flatnonzero(span.parents != np.arange(-1, span.nodes - 1))
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


def words_for(nodes: int) -> int:
    """Words that hold a bit for each of some nodes; at least 1."""
    return max(1, -(-nodes // _WORD_BITS))


def _table(columns: Sequence[NDArray[np.int64]]) -> Ints:
    """Columns side by side."""
    table = np.empty((len(columns[0]), len(columns)), np.int32)
    for i, column in enumerate(columns):
        table[:, i] = column
    return table


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of consecutive runs begins."""
    return np.cumsum(counts) - counts


def ancestor_words(parents: Ints, sizes: NDArray[np.int64], width: int) -> Ints:
    """The tree mask as bits: each node sees itself and its ancestors. Node i is bit i % 32 of word i // 32.

    parents: of all drafts' nodes, an index within the draft before its children; ROOT for none. sizes: nodes of each
    draft. Returns [all nodes, width] int32.
    """
    total = len(parents)
    words = np.zeros((total + 1, width), np.uint32)  # the extra last row sees nothing
    if total:
        begin = np.repeat(_starts(sizes), sizes)
        local = np.arange(total) - begin
        words[np.arange(total), local // _WORD_BITS] = np.uint32(1) << (local % _WORD_BITS).astype(np.uint32)
        above = np.append(np.where(parents == ROOT, total, parents + begin), total)
        while (above != total).any():  # ancestors within 1, 2, 4, ... levels
            words |= words[above]
            above = above[above]
    return words[:total].view(np.int32)


def _shared(rows: NDArray[np.int64], splits: NDArray[np.int64], load: Load, fair: int) -> NDArray[np.bool_]:
    """The tiles that several programs share: those with more splits than a program's fair share, if there is room."""
    while True:
        shared = splits > fair
        if int((rows * splits)[shared].sum()) <= load.partial_rows and int(splits[shared].sum()) <= load.items:
            return shared
        fair *= 2


def _items(
    first: NDArray[np.int64], stop: NDArray[np.int64], rows: NDArray[np.int64], base: NDArray[np.int64],
    shared: NDArray[np.bool_], seen: tuple[NDArray[np.int64], NDArray[np.int64]], keys: int,
) -> Ints:  # fmt: skip
    """seen: [tiles] each, the first key that a tile sees and the one behind the last; keys: of a split."""
    splits = stop - first
    count = np.where(shared, splits, 1)
    tile = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(tile)) - np.repeat(_starts(count), count)
    alone = ~shared[tile]
    begin = first[tile] + nth
    end = np.where(alone, stop[tile], begin + 1)
    partial = np.where(alone, -1, base[tile] + nth * rows[tile])
    taken = np.minimum(end * keys, seen[1][tile]) - np.maximum(begin * keys, seen[0][tile])
    order = np.argsort(-taken, kind="stable")  # costliest first
    return _table([column[order] for column in (tile, begin, end, partial)])


def _folds(
    first: NDArray[np.int64], stop: NDArray[np.int64], rows: NDArray[np.int64], base: NDArray[np.int64],
    shared: NDArray[np.bool_],
) -> Ints:  # fmt: skip
    tile = np.repeat(np.arange(len(rows)), rows)
    nth = np.arange(len(tile)) - np.repeat(_starts(rows), rows)
    live = shared[tile]
    return _table([(base[tile] + nth) * live, rows[tile] * live, (stop - first)[tile] * live])
