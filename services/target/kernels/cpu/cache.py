"""Moving rows of the KV cache in every layer with one call; its plain twin is that of `KVCache` itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from services.target.kernels.cpu import library


class Mover:
    """Moves rows of some pools, which stay where they are. pools, row_bytes: `count` of them, as C arrays."""

    def __init__(self, pools: Sequence[Tensor]) -> None:
        """pools: [pages, page_size, kv_heads, head_dim] each."""
        assert all(pool.is_contiguous() for pool in pools), "kernels walk through memory in order"
        self.count = len(pools)
        self.pools = (ctypes.c_void_p * self.count)(*(pool.data_ptr() for pool in pools))
        self.row_bytes = (ctypes.c_int64 * self.count)(*(pool[0, 0].nbytes for pool in pools))
        self._move = library.load().outrider_move_rows

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """As of `KVCache.move`: one after the other."""
        sources, destinations = sources.contiguous(), destinations.contiguous()
        self._move(self.pools, self.row_bytes, self.count, sources.data_ptr(), destinations.data_ptr(), len(sources))
