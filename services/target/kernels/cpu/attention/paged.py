"""The compiled attention kernel for models that run module by module."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from services.target.kernels.cpu import library
from services.target.kernels.cpu.attention.batch_view import BatchPointers
from services.target.kernels.cpu.library import AttentionShape
from services.target.kernels.cpu.pool import shared_pool
from services.target.kernels.grouped import GroupedAttention
from services.target.kernels.pools import gather_pages
from services.target.step.batch import Batch

# Formats of pools, as in outrider/native/include/fp8.h.
POOL_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
WIDEST_HEAD = 576  # in csrc/attention/attention.h


class NativeAttention:
    """Attention of one batch; call it once a layer. PyTorch computes the shapes that the kernel does not support.

    Pools not wider than the queries are read in place. The batch's pages of wider pools are converted, layer by layer.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._pool = shared_pool()

    @functools.cached_property
    def _view(self) -> BatchPointers:
        return BatchPointers(self._batch)

    @functools.cached_property
    def _gathered_view(self) -> BatchPointers:
        return BatchPointers(self._batch, gathered=True)

    @functools.cached_property
    def _gathering(self) -> GroupedAttention:
        return GroupedAttention(self._batch)

    def __call__(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Same arguments and result as `reference.paged_attention`."""
        shared = v_pool.data_ptr() == k_pool.data_ptr()
        if not serves(q.dtype, k_pool.shape[3], v_pool.shape[3]) or not (shared or v_pool.is_contiguous()):
            return self._gathering(q, k_pool, v_pool, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        view = self._view
        if not reads(q.dtype, k_pool.dtype):
            view = self._gathered_view
            pages = torch.from_numpy(view.pages)
            k_pool = gather_pages(k_pool, pages, q.dtype)
            v_pool = k_pool[..., : v_pool.shape[3]] if shared else gather_pages(v_pool, pages, q.dtype)
        queries = q.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
        out = torch.empty(*q.shape[:2], v_pool.shape[3])
        wide_sinks = None if sinks is None else sinks.float().contiguous()
        shape = AttentionShape(
            q.shape[1], k_pool.shape[2], q.shape[2], v_pool.shape[3], scaling, window or 0, softcap or 0.0,
            None if wide_sinks is None else wide_sinks.data_ptr(), k_pool.shape[3] if shared else 0,
        )  # fmt: skip
        library.load().outrider_attention(
            self._pool.handle, view.pointer, ctypes.byref(shape), queries.data_ptr(), out.data_ptr(),
            k_pool.data_ptr(), v_pool.data_ptr(), q.dtype == torch.bfloat16, POOL_FORMATS[k_pool.dtype],
        )  # fmt: skip
        return out.to(q.dtype)


def reads(computed: torch.dtype, pools: torch.dtype) -> bool:
    """True if the kernel reads pools of a format in place, for queries computed in another."""
    return pools in POOL_FORMATS and computed in POOL_FORMATS and pools.itemsize <= computed.itemsize <= 4


def serves(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """True if the kernel supports a layer's format and head dimensions."""
    return dtype in (torch.float32, torch.bfloat16) and max(key_dim, value_dim) <= WIDEST_HEAD
