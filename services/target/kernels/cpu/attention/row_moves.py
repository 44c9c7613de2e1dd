"""Moves of cache rows in every layer with one call; the plain twin is in `KVCache.move`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from services.target.kernels.cpu import library


class Mover:
    """Moves rows of pools whose addresses do not change."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        """pools: [pages, page_size, kv_heads, head_dim] each."""
        assert all(pool.is_contiguous() for pool in pools), "kernels walk through memory in order"
        self._count = len(pools)
        self._pools = (ctypes.c_void_p * self._count)(*(pool.data_ptr() for pool in pools))
        self._row_bytes = (ctypes.c_int64 * self._count)(*(pool[0, 0].nbytes for pool in pools))
        self._move = library.load().outrider_move_rows

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Move rows in order, as `KVCache.move`."""
        sources, destinations = sources.contiguous(), destinations.contiguous()
        self._move(self._pools, self._row_bytes, self._count, sources.data_ptr(), destinations.data_ptr(), len(sources))
