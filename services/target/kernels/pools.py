"""Pools of the paged KV cache: their shapes and number formats, and reading rows from them.

    pool  [pages + 1, page_size, kv_heads, head_dim]     page 0 is NULL_PAGE; slot = page * page_size + offset

A pool may be narrower than the computation: writing converts, and reading converts back. FP8 pools store numbers
without a scale, rounded to nearest; numbers beyond the format's range become its largest (448 in e4m3, 57344 in e5m2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.config import KVCacheDType
from outrider.errors import ConfigError

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES: dict[KVCacheDType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class LayerShape:
    """What a layer stores for a token: kv_heads keys of key_dim and values of value_dim numbers.

    shared: the values are the first numbers of the keys and have no pool of their own
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
    """Hidden states that a cache stores for each token beside keys and values. width: numbers a token."""

    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes a token."""
        return self.width * self.dtype.itemsize


class CachePools(Protocol):
    """The pools of a cache, as compiled programs read and write them; `kv_cache.KVCache` owns them."""

    keys: list[Tensor]
    values: list[Tensor]
    states: Tensor | None


def stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert rows to the format of a pool."""
    if rows.dtype != dtype and dtype in _FP8:
        limit = torch.finfo(dtype).max
        rows = rows.clamp(-limit, limit)
    return rows.to(dtype)


def gather(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Read rows of a pool, converted to dtype. slots: [n] int64. Returns [n, kv_heads, D]."""
    return indexable(pool).flatten(0, 1).index_select(0, slots).view(pool.dtype).to(dtype)


def gather_pages(pool: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Read whole pages of a pool, converted to dtype. pages: [n]. Returns [n, page_size, kv_heads, D]."""
    return indexable(pool).index_select(0, pages).view(pool.dtype).to(dtype)


def indexable(tensor: Tensor) -> Tensor:
    """A view of a pool in a format that every device can index: uint8 for fp8."""
    return tensor.view(torch.uint8) if tensor.dtype in _FP8 else tensor


def pick_cache_dtype(flag: KVCacheDType, computed: torch.dtype, device: torch.device) -> torch.dtype:
    """The pools' format for --kv-cache-dtype. computed: that of the model's keys. Raises ConfigError."""
    dtype = computed if flag == "auto" else _DTYPES[flag]
    if dtype == torch.bfloat16 and computed == torch.float16:
        raise ConfigError(f"--kv-cache-dtype {flag} would only lose digits of --dtype float16; leave it at auto")
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"--kv-cache-dtype {flag} needs a GPU of compute capability 8.9 or more; choose fp8_e5m2")
    return dtype


def token_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of a token in all layers."""
    return sum(shape.numbers for shape in shapes) * dtype.itemsize
