"""Ragged paged attention with a tree mask: the doorman, which picks the kernel for a device.

`reference.paged_attention` is the plain twin that all others are tested against; `grouped` gathers pages for PyTorch's
fused attention, on any device. A native kernel of a device is another class of `Attention` that `plan` returns.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.target.batch import Batch
from services.target.kernels.grouped import GroupedAttention


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


def plan(batch: Batch) -> Attention:
    """The attention of a batch on its device."""
    return GroupedAttention(batch)
