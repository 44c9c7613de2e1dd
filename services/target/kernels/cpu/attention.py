"""The compiled attention kernel for models that run module by module."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from services.target.batch import Batch
from services.target.kernels.cpu import library
from services.target.kernels.cpu.library import AttentionShape
from services.target.kernels.cpu.pool import shared_pool
from services.target.kernels.cpu.view import View
from services.target.kernels.grouped import GroupedAttention

_WIDEST = 576  # a head, in csrc/attention.h


class NativeAttention:
    """Attention of one batch; call it once a layer. Pools that the kernel cannot read are gathered by PyTorch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._pool = shared_pool()

    @functools.cached_property
    def _view(self) -> View:
        return View(self._batch)

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
        if not _readable(k_pool, q.dtype) or not _readable(v_pool, q.dtype):
            return self._gathering(q, k_pool, v_pool, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
        queries = q.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
        out = torch.empty(*q.shape[:2], v_pool.shape[3])
        wide_sinks = None if sinks is None else sinks.float().contiguous()
        shape = AttentionShape(
            q.shape[1], k_pool.shape[2], q.shape[2], v_pool.shape[3], scaling, window or 0, softcap or 0.0,
            None if wide_sinks is None else wide_sinks.data_ptr(),
        )  # fmt: skip
        library.load().outrider_attention(
            self._pool.handle, self._view.pointer, ctypes.byref(shape), queries.data_ptr(), out.data_ptr(),
            k_pool.data_ptr(), v_pool.data_ptr(), k_pool.dtype == torch.bfloat16,
        )  # fmt: skip
        return out.to(q.dtype)


def _readable(pool: Tensor, dtype: torch.dtype) -> bool:
    return (
        pool.dtype == dtype
        and dtype in (torch.float32, torch.bfloat16)
        and pool.is_contiguous()
        and pool.shape[3] <= _WIDEST
    )
