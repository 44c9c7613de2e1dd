"""Writing rows of the paged cache on CUDA, one launch a layer, and moving rows, one launch for all layers.

Rows of NULL_PAGE are never written, so no row can read results of padding.
"""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN001, ANN201, N803

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = 1024  # bytes of a row that one program moves


@triton.jit
def write_rows(
    slots, keys, values, k_pool, v_pool, k_row, k_head, v_row, v_head, k_page, k_slot, v_page, v_slot,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """keys, values: [T, HEADS, D or DV]; one program a row. LIMIT: largest number that pools hold, or 0."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= PAGE:  # smaller slots belong to NULL_PAGE
        page, offset = slot // PAGE, slot % PAGE
        d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
        key = tl.load(keys + row * k_row + (d // D) * k_head + d % D, mask=d < HEADS * D)
        value = tl.load(values + row * v_row + (dv // DV) * v_head + dv % DV, mask=dv < HEADS * DV)
        if LIMIT > 0:
            key = tl.minimum(tl.maximum(key.to(tl.float32), -LIMIT), LIMIT)
            value = tl.minimum(tl.maximum(value.to(tl.float32), -LIMIT), LIMIT)
        tl.store(k_pool + page * k_page + offset * k_slot + d, key.to(k_pool.dtype.element_ty), mask=d < HEADS * D)
        tl.store(v_pool + page * v_page + offset * v_slot + dv, value.to(v_pool.dtype.element_ty), mask=dv < HEADS * DV)


def write(slots: Tensor, keys: Tensor, values: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Store rows, as `KVCache.write` does.

    slots: [T] int64; keys, values: [T, kv_heads, D or Dv]; pools: [pages, page_size, kv_heads, D or Dv].
    """
    _, page_size, heads, key_dim = k_pool.shape
    value_dim = v_pool.shape[3]
    assert keys.stride(2) == values.stride(2) == 1, "a head's numbers lie together"
    assert k_pool.is_contiguous(), "a slot's heads lie together"
    assert v_pool.is_contiguous(), "a slot's heads lie together"
    write_rows[(len(slots),)](
        slots, keys, values, k_pool, v_pool, *keys.stride()[:2], *values.stride()[:2],
        *k_pool.stride()[:2], *v_pool.stride()[:2],
        HEADS=heads, D=key_dim, DV=value_dim, D_PAD=triton.next_power_of_2(heads * key_dim),
        DV_PAD=triton.next_power_of_2(heads * value_dim), PAGE=page_size,
        LIMIT=largest(k_pool),
    )  # fmt: skip


def largest(pool: Tensor) -> float:
    """The largest number of an fp8 pool, to which larger ones are clamped; 0 for wider pools, which are not clamped."""
    return torch.finfo(pool.dtype).max if pool.dtype.itemsize == 1 else 0.0


@triton.jit(do_not_specialize=["count"])
def move_rows(pools, row_bytes, sources, destinations, count, PART: tl.constexpr):
    """pools, row_bytes: [P] int64, addresses of the pools and their row sizes. One program a pool and part of a row."""
    pool = tl.program_id(0)
    size = tl.load(row_bytes + pool)
    begin = tl.load(pools + pool).to(tl.pointer_type(tl.uint8))
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    for i in range(count):
        row = tl.load(begin + tl.load(sources + i) * size + at, mask=at < size)
        tl.store(begin + tl.load(destinations + i) * size + at, row, mask=at < size)


@triton.jit(do_not_specialize=["side", "depths"])
def move_paths(pools, row_bytes, moves, side, depths, PART: tl.constexpr):
    """moves: [2, S, depths] int64, source slots and, `side` numbers further, destinations.

    One program a pool, part of a row, and session.
    """
    pool = tl.program_id(0)
    size = tl.load(row_bytes + pool)
    begin = tl.load(pools + pool).to(tl.pointer_type(tl.uint8))
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    first = moves + tl.program_id(2) * depths
    for depth in range(depths):
        source = tl.load(first + depth)
        destination = tl.load(first + side + depth)
        if source != destination:
            row = tl.load(begin + source * size + at, mask=at < size)
            tl.store(begin + destination * size + at, row, mask=at < size)


class Mover:
    """Moves rows between slots in all pools of a cache with one launch."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        """pools: contiguous, [pages, page_size, kv_heads, dim] each; their addresses must not change."""
        device = pools[0].device
        sizes = [pool[0, 0].numel() * pool.element_size() for pool in pools]
        self._pools = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64, device=device)
        self._row_bytes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self._grid = (len(pools), -(-max(sizes) // _PART))
        nowhere = torch.zeros(1, dtype=torch.int64, device=device)
        self.move(nowhere, nowhere)  # compiles the kernels before the first step needs them
        self.move_paths(nowhere.new_zeros(2, 1, 1))

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy rows in order. Both [n] int64. No destination may be a later source."""
        move_rows[self._grid](self._pools, self._row_bytes, sources, destinations, len(sources), PART=_PART)

    def move_paths(self, moves: Tensor) -> None:
        """As `KVCache.move_paths`. moves: [2, S, D] int64."""
        _, sessions, depths = moves.shape
        assert moves[0].is_contiguous(), "the kernel walks through each side in order"
        grid = (*self._grid, sessions)
        move_paths[grid](self._pools, self._row_bytes, moves, moves.stride(0), depths, PART=_PART)
