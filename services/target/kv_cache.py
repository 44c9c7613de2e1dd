"""The paged KV cache: one pool of keys and one of values a layer; rows are written, moved and read by slot.

    pool  [pages + 1, page_size, kv_heads, head_dim]     page 0 is NULL_PAGE; slot = page * page_size + offset

Which session owns which page is none of this module's business; see outrider.paging.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.paging.allocator import NULL_PAGE

# On a CPU a memory fraction would lock up gigabytes that nobody fills; this many tokens are plenty.
_MAX_CPU_TOKENS = 64 * 1024


@dataclass(frozen=True)
class LayerShape:
    """What a layer stores for a token: kv_heads keys of key_dim and values of value_dim numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Pools of all layers; layers may differ in shape."""

    def __init__(
        self, shapes: Sequence[LayerShape], pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """pages: usable pages; NULL_PAGE comes on top."""
        self.pages, self.page_size = pages, page_size

        def pool(kv_heads: int, dim: int) -> Tensor:
            # Memory is taken as pages are first used. What padded rows read must be finite, though.
            rows = torch.empty(pages + 1, page_size, kv_heads, dim, dtype=dtype, device=device)
            rows[NULL_PAGE].zero_()
            return rows

        self.keys = [pool(shape.kv_heads, shape.key_dim) for shape in shapes]
        self.values = [pool(shape.kv_heads, shape.value_dim) for shape in shapes]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows. slots: [T] int64; keys: [T, kv_heads, key_dim]; values: [T, kv_heads, value_dim]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy rows between slots in every layer; all are read before any is written. Both [n] int64."""
        for pool in (*self.keys, *self.values):
            rows = pool.flatten(0, 1)
            rows.index_copy_(0, destinations, rows.index_select(0, sources))


def token_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes that a token takes in all layers."""
    return sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes) * dtype.itemsize


def pages_that_fit(
    bytes_per_token: int, page_size: int, max_total_tokens: int | None, memory_fraction: float, device: torch.device
) -> int:
    """Usable pages of a pool, in pages: as told, or as many as the memory fraction holds beside the weights.

    Raises ConfigError if that is less than one page.
    """
    if max_total_tokens is not None:
        pages = max_total_tokens // page_size
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        pages = int(free - (1.0 - memory_fraction) * total) // (bytes_per_token * page_size)
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        tokens = min(int(memory_fraction * available) // bytes_per_token, _MAX_CPU_TOKENS)
        pages = tokens // page_size
    if pages < 1:
        raise ConfigError(
            f"the KV cache has no room for a page of {page_size} tokens ({bytes_per_token * page_size} bytes); "
            "raise --max-total-tokens or --mem-fraction-static, or lower --page-size"
        )
    return pages
