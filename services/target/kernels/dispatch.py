"""Choice of the kernel for ragged paged attention with a tree mask.

`reference.paged_attention` is the plain twin that all others are tested against; `grouped` gathers pages for PyTorch's
fused attention, on any device; `cuda.attention` reads pages in place on CUDA, `cpu.attention.paged` on CPUs.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from outrider.errors import ConfigError
from services.target.kernels.cpu import library
from services.target.kernels.grouped import GroupedAttention
from services.target.step.batch import Batch

log = logging.getLogger(__name__)


class Attention(Protocol):
    """Attention of one batch, called once a layer. Arguments and result as in `reference.paged_attention`."""

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
    ) -> Tensor: ...


Planner = Callable[[Batch], Attention]


def choose(backend: str, device: torch.device, *, ordered: bool = False) -> Planner:
    """The function that makes the attention of a batch on a device. backend: --attention-backend.

    ordered: sum over keys in the order of plain decoding, also along branches of a draft tree; native always does.
    Raises ConfigError for an unknown or unavailable backend.
    """
    if backend == "auto":
        backend = _best(device)
    if backend == "torch_native":
        return GroupedAttention
    if backend == "native":
        return _native(device)
    if backend != "triton":
        raise ConfigError(f'--attention-backend "{backend}" is not known; choose auto, native, triton or torch_native')
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--attention-backend triton needs the package triton, which is not installed")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"--attention-backend triton needs a CUDA device, not {device}; leave it at auto")
    from services.target.kernels.cuda.attention import TritonAttention

    return functools.partial(TritonAttention, ordered=True) if ordered else TritonAttention


def _best(device: torch.device) -> str:
    if device.type == "cuda":
        return "triton" if importlib.util.find_spec("triton") else "torch_native"
    try:
        library.load()
    except library.Unavailable as reason:
        log.info("no compiled kernels: %s; using PyTorch's attention", reason)
        return "torch_native"
    return "native"


def _native(device: torch.device) -> Planner:
    if device.type != "cpu":
        raise ConfigError(f"--attention-backend native is for CPUs, not {device}; leave it at auto")
    try:
        library.load()
    except library.Unavailable as reason:
        raise ConfigError(f"--attention-backend native is not available: {reason}") from None
    from services.target.kernels.cpu.attention.paged import NativeAttention

    return NativeAttention


def plan(batch: Batch) -> Attention:
    """The default attention of a batch on its device."""
    return choose("auto", batch.device)(batch)
