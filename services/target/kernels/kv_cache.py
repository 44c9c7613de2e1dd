"""The paged KV cache: one pool of keys and one of values a layer; rows are written, moved and read by slot.

    pool  [pages + 1, page_size, kv_heads, head_dim]     page 0 is NULL_PAGE; slot = page * page_size + offset

Pools may be narrower than what the model computes in: `write` converts, and who attends converts back to the format of
its queries. Formats of 8 bits hold the numbers themselves, without a scale: rounded to the nearest, and what is too
large becomes the largest (448 in e4m3, 57344 in e5m2). A row's bits depend on the row alone.

Which session owns which page is none of this module's business; see outrider.paging.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.config import KVCacheDType
from outrider.errors import ConfigError
from outrider.paging.allocator import NULL_PAGE

# On a CPU a memory fraction would lock up gigabytes that nobody fills; this many tokens are plenty.
_MAX_CPU_TOKENS = 64 * 1024

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES: dict[KVCacheDType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class LayerShape:
    """What a layer stores for a token: kv_heads keys of key_dim and values of value_dim numbers.

    shared: the values are the first numbers of the keys, and have no pool of their own
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    shared: bool = False

    @property
    def numbers(self) -> int:
        """Numbers a token."""
        return self.kv_heads * (self.key_dim + (0 if self.shared else self.value_dim))


@dataclass(frozen=True)
class States:
    """What a cache keeps of each row beside keys and values. width: numbers a token."""

    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes a token."""
        return self.width * self.dtype.itemsize


class KVCache:
    """Pools of all layers; layers may differ in shape."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kept: States | None = None,
    ) -> None:
        """pages: usable pages; NULL_PAGE comes on top. dtype: of the pools, see `pick_cache_dtype`.

        kept: hidden states of every row, which a head reads that drafts behind the model
        """
        self.pages, self.page_size = pages, page_size

        def pool(kv_heads: int, dim: int) -> Tensor:
            # Memory is taken as pages are first used. What padded rows read must be finite, though.
            rows = torch.empty(pages + 1, page_size, kv_heads, dim, dtype=dtype, device=device)
            _plain(rows)[NULL_PAGE].zero_()
            return rows

        self.dtype = dtype
        self.on_move: Callable[[Tensor, Tensor], None] | None = None  # told of every move before it is made
        self.keys = [pool(shape.kv_heads, shape.key_dim) for shape in shapes]
        self.values = [
            keys[..., : shape.value_dim] if shape.shared else pool(shape.kv_heads, shape.value_dim)
            for shape, keys in zip(shapes, self.keys, strict=True)
        ]
        own_values = [values for shape, values in zip(shapes, self.values, strict=True) if not shape.shared]
        self._shared = [shape.shared for shape in shapes]
        self.states: Tensor | None = None
        if kept is not None:  # zeros, because a head may meet rows that nobody has written for it
            self.states = torch.zeros(pages + 1, page_size, kept.width, dtype=kept.dtype, device=device)
        self._pools = [*self.keys, *own_values, *([] if self.states is None else [self.states])]
        self._on_device: Any = None
        self._mover: Any = None
        if device.type == "cpu":
            from services.target.kernels.cpu import cache, library

            self._mover = cache.Mover(self._pools) if library.available() else None
        if device.type == "cuda" and importlib.util.find_spec("triton"):
            from services.target.kernels.cuda import cache as triton_cache

            self._on_device = triton_cache
            self._mover = triton_cache.Mover(self._pools)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows. slots: [T] int64; keys: [T, kv_heads, key_dim]; values: [T, kv_heads, value_dim]."""
        if self._on_device:
            pool, values = (self.keys[layer], keys) if self._shared[layer] else (self.values[layer], values)
            self._on_device.write(slots, keys, values, self.keys[layer], pool)  # shared: twice the same
            return
        self._write(self.keys[layer], slots, keys)
        if not self._shared[layer]:
            self._write(self.values[layer], slots, values)

    def _write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        _plain(pool).flatten(0, 1).index_copy_(0, slots, _plain(stored(rows, self.dtype)))

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy rows between slots in every layer. Both [n] int64. No destination may be a later source."""
        if self.on_move is not None:
            self.on_move(sources, destinations)
        if self._mover is not None:
            self._mover.move(sources, destinations)
            return
        for pool in self._pools:
            rows = _plain(pool).flatten(0, 1)
            rows.index_copy_(0, destinations, rows.index_select(0, sources))

    @property
    def mover(self) -> Any:
        """What moves rows with compiled code; None if nothing does."""
        return self._mover

    def move_paths(self, moves: Tensor) -> None:
        """Copy rows of many sessions between slots in every layer. moves: [2, S, D] int64, from and to; 0 is nothing.

        A session's moves are made in order; no destination of one is a source of another.
        """
        if self._on_device:
            self._mover.move_paths(moves)
        else:
            self.move(*moves.flatten(1))


def stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a pool of this format holds them."""
    if rows.dtype != dtype and dtype in _EIGHT_BITS:
        limit = torch.finfo(dtype).max
        rows = rows.clamp(-limit, limit)
    return rows.to(dtype)


def gather(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a pool, in another format. slots: [n] int64. Returns [n, kv_heads, D]."""
    return _plain(pool).flatten(0, 1).index_select(0, slots).view(pool.dtype).to(dtype)


def gather_pages(pool: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole pages of a pool, in another format. pages: [n]. Returns [n, page_size, kv_heads, D]."""
    return _plain(pool).index_select(0, pages).view(pool.dtype).to(dtype)


def _plain(tensor: Tensor) -> Tensor:
    """The same memory in a format that can be indexed on every device."""
    return tensor.view(torch.uint8) if tensor.dtype in _EIGHT_BITS else tensor


def pick_cache_dtype(flag: KVCacheDType, computed: torch.dtype, device: torch.device) -> torch.dtype:
    """The pools' format for --kv-cache-dtype. computed: that of the model's keys. Raises ConfigError."""
    dtype = computed if flag == "auto" else _DTYPES[flag]
    if dtype == torch.bfloat16 and computed == torch.float16:
        raise ConfigError(f"--kv-cache-dtype {flag} would only lose digits of --dtype float16; leave it at auto")
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"--kv-cache-dtype {flag} needs a GPU of compute capability 8.9 or more; choose fp8_e5m2")
    return dtype


def token_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes that a token takes in all layers."""
    return sum(shape.numbers for shape in shapes) * dtype.itemsize


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
