"""Prepared spans (step/prepared.py) on CUDA, whose plain twin takes some seventy launches: one launch chooses the draft
tokens of all sessions and writes what follows from them.

These launches stand between two steps, where the device has nothing else to do.
"""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.target.step.prepared import MAX_DRAFT, MAX_NODES, NO_TOKEN, PreparedSpans


@triton.jit
def _slot(pages, one, page_columns, page_size, place, mask):
    first = tl.load(pages + one * page_columns)
    page = tl.load(pages + one * page_columns + 1 + place // page_size - first, mask=mask, other=0)
    return page * page_size + place % page_size


@triton.jit(do_not_specialize=["count", "width", "sampled_rows", "page_columns", "key_count"])
def choose(
    samples, nodes, sessions, firsts, pages, keys, ids, positions, slots, moved, words, columns, own_keys,
    count, width, sampled_rows, page_columns, key_count, page_size,
    NODES: tl.constexpr, FILLER: tl.constexpr, NO_TOKEN: tl.constexpr, KEYED: tl.constexpr,
):  # fmt: skip
    """One program a session, one lane an entry of its table. Arguments as of PreparedSpans.

    ids, positions, slots: inputs of the batch, [T] int64; moved: [T] int32, by how much a row's span begins later;
    words: [N] int32, the tree mask's bits of each draft token; columns: [5, R] int64; own_keys: [R, 2] int64
    """
    one = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, NODES).to(tl.int64)
    plane = count * NODES
    table = nodes + one * NODES
    token, parent = tl.load(table + entry), tl.load(table + plane + entry)
    depth, row = tl.load(table + 2 * plane + entry), tl.load(table + 3 * plane + entry)
    ancestors = tl.load(table + 4 * plane + entry)
    root_row, root_position = tl.load(sessions + one), tl.load(sessions + count + one)
    last, room = tl.load(sessions + 2 * count + one), tl.load(sessions + 3 * count + one)

    below = parent < NODES
    parent_row = tl.where(below, tl.load(table + 3 * plane + parent, mask=below, other=0), root_row)
    judged = parent_row >= 0
    wrong = judged & (tl.load(samples + tl.maximum(parent_row, 0)) != token)
    bit = tl.full([NODES], 1, tl.int64) << entry
    good = (ancestors & tl.sum(tl.where(wrong, bit, 0), 0)) == 0
    accepted = tl.max(tl.where(good & (row >= 0), depth, 0), 0)
    end = tl.max(tl.where(good & (row >= 0) & (depth == accepted), row, -1), 0)
    bonus = tl.load(samples + tl.where(accepted > 0, end, root_row))
    position = root_position + accepted + 1
    alive = good & (parent_row < 0) & (root_position + depth <= last)
    rank = tl.cumsum(alive.to(tl.int32), 0).to(tl.int64) - 1
    chosen = alive & (rank < room)
    place = tl.where(chosen, rank, -1)
    survivors = tl.minimum(tl.sum(alive.to(tl.int32), 0).to(tl.int64), room)

    # [NODES, NODES]: of each entry, which other is its parent, and which are its ancestors or itself.
    at_parent = parent[:, None] == entry[None, :]
    parent_place = tl.sum(tl.where(at_parent, place[None, :] + 1, 0), 1)  # from 1; 0 is the root
    seen = ((ancestors[:, None] >> entry[None, :]) & 1) == 1
    place_bit = tl.where(chosen, tl.full([NODES], 1, tl.int64) << tl.maximum(place, 0), 0)
    bits = tl.sum(tl.where(seen, place_bit[None, :], 0), 1)

    first_row, first_sample = tl.load(firsts + one), tl.load(firsts + count + one)
    first_node = tl.load(firsts + 2 * count + one)
    nowhere = count * width

    # Rows of the span: lane 0 the root, lane i the draft token of place i - 1, of which those behind are filler.
    lane = tl.arange(0, FILLER).to(tl.int64)
    is_root = lane == 0
    plain = (is_root | (lane > survivors)) & (lane <= room)
    own = tl.where(is_root, bonus, NO_TOKEN)
    slot = _slot(pages, one, page_columns, page_size, position + lane, plain)
    root_slot = _slot(pages, one, page_columns, page_size, position + 0 * lane, plain)
    tl.store(ids + first_row + lane, tl.maximum(own, 0), mask=plain)
    tl.store(positions + first_row + lane, position + 0 * lane, mask=plain)
    tl.store(slots + first_row + lane, slot, mask=plain)
    tl.store(moved + first_row + lane, (accepted + 0 * lane).to(tl.int32), mask=lane <= room)
    filler = plain & (lane > 0)
    tl.store(words + first_node + lane - 1, (tl.full([FILLER], 1, tl.int64) << tl.maximum(lane - 1, 0)).to(tl.int32),
             mask=filler)  # fmt: skip
    at = columns + first_sample + lane
    tl.store(at, first_sample + 0 * lane, mask=plain)
    tl.store(at + sampled_rows, own, mask=plain)
    tl.store(at + 2 * sampled_rows, tl.where(is_root, nowhere, one * width), mask=plain)
    tl.store(at + 3 * sampled_rows, slot, mask=plain)
    tl.store(at + 4 * sampled_rows, root_slot, mask=plain)

    level = depth - accepted - 1
    slot = _slot(pages, one, page_columns, page_size, position + 1 + place, chosen)
    at = first_row + 1 + place
    tl.store(ids + at, token, mask=chosen)
    tl.store(positions + at, position + level, mask=chosen)
    tl.store(slots + at, slot, mask=chosen)
    tl.store(words + first_node + place, bits.to(tl.int32), mask=chosen)
    at = columns + first_sample + 1 + place
    tl.store(at, first_sample + parent_place, mask=chosen)
    tl.store(at + sampled_rows, token, mask=chosen)
    tl.store(at + 2 * sampled_rows, one * width + level - 1, mask=chosen)
    tl.store(at + 3 * sampled_rows, slot, mask=chosen)
    target = _slot(pages, one, page_columns, page_size, position + level, chosen)
    tl.store(at + 4 * sampled_rows, target, mask=chosen)

    if KEYED:
        for word in tl.static_range(2):
            key = tl.load(keys + (one * key_count + accepted + 0 * lane) * 2 + word)
            tl.store(own_keys + (first_sample + lane) * 2 + word, key, mask=plain)
            key = tl.load(keys + (one * key_count + accepted + level) * 2 + word, mask=chosen, other=0)
            tl.store(own_keys + (first_sample + 1 + place) * 2 + word, key, mask=chosen)


class FusedSpans(PreparedSpans):
    """Prepared spans in one launch. `parents` and `spans` are left to the plain twin, which serves hosts."""

    def put(self, ids: Tensor, positions: Tensor, slots: Tensor) -> None:
        """As of PreparedSpans."""
        rows, count, device = int(self.maps.rows[2].max()) + 1, len(self), ids.device
        self._row_moves = torch.zeros(len(ids), dtype=torch.int32, device=device)
        self._bits = torch.empty(max(int(self.maps.nodes[1].max(initial=0)) + 1, 1), dtype=torch.int32, device=device)
        self._columns = torch.empty(5, rows, dtype=torch.int64, device=device)
        self._own_keys = torch.empty(rows, 2, dtype=torch.int64, device=device)
        choose[(count,)](
            self.taken, self._tree, self._sessions, self._firsts, self._pages, self._keys, ids, positions, slots,
            self._row_moves, self._bits, self._columns, self._own_keys,
            count, self.width, rows, self._pages.shape[1], self._keys.shape[1], self.page_size,
            NODES=MAX_NODES, FILLER=MAX_DRAFT + 1, NO_TOKEN=NO_TOKEN, KEYED=len(self._keys) > 0, num_warps=4,
        )  # fmt: skip

    def shift(self, firsts: Tensor, starts: Tensor) -> None:
        """As of PreparedSpans."""
        by = self._row_moves.index_select(0, firsts)
        starts += by.view(-1, *[1] * (starts.dim() - 1))

    def words(self, words: Tensor) -> None:
        """As of PreparedSpans."""
        if self.width:
            nodes = self._nodes[1]
            words.select(1, 0).index_copy_(0, nodes, self._bits.index_select(0, nodes))

    def keys(self, keys: Tensor) -> None:
        """As of PreparedSpans."""
        if len(self._keys):
            rows = self._rows[2]
            keys.index_copy_(0, rows, self._own_keys.index_select(0, rows))

    def tree_columns(self, samples: int) -> Tensor:
        """As of PreparedSpans."""
        if samples == self._rows.shape[1]:
            return self._columns
        rows = self._rows[2]
        return self._roots(samples).index_copy_(1, rows, self._columns.index_select(1, rows))
