"""Ragged paged attention by gathering: sessions of similar shape share one call of PyTorch's fused attention.

Spans with equal numbers of rows and similar numbers of keys form a group; their keys are gathered from the pool once a
layer and padded to the longest. Query heads that share a key head are stacked as rows, so that no key is copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.target.kernels import reference
from services.target.kernels.pools import gather
from services.target.step.batch import Batch
from services.target.step.layout import Span

# Up to this many rows, query heads that share a key head are stacked as rows, with a mask row each.
_PACKED_ROWS = 64


class _Group:
    """Spans with equally many rows. B spans, R rows each, at most K keys."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = spans
        self.rows = spans[0].rows
        self.keys = max(span.keys for span in spans)
        self.nodes = any(span.nodes for span in spans)
        slots = np.empty((len(spans), self.keys), dtype=np.int64)
        for i, span in enumerate(spans):
            slots[i, : span.keys] = span.slots
            slots[i, span.keys :] = span.slots[0]  # pad with a key that all rows see; others may be NaN
        self.slots = torch.from_numpy(slots).to(device).flatten()  # [B * K]
        rows = np.concatenate([np.arange(span.first, span.first + span.rows) for span in spans])
        self.take = torch.from_numpy(rows).to(device)  # [B * R]
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = {}

    @property
    def plain_prompt(self) -> bool:
        """True for prompts from their first token on, whose mask is causal."""
        return self.rows > 1 and all(span.start == 0 and span.nodes == 0 for span in self.spans)

    def mask(self, window: int | None, repeat: int, like: Tensor) -> Tensor | None:
        """Additive mask [B, 1, repeat * R, K] of a window; None if every row sees every key."""
        key = (window, repeat, like.dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, repeat, like)
        return self._masks[key]

    def sees(self, keys: Tensor, window: int | None, like: Tensor) -> Tensor:
        """The rows that see any of some keys. keys: [B, K] bool. Returns [B, R] bool."""
        mask = self.mask(window, 1, like)
        return (keys[:, None] & (True if mask is None else mask[:, 0] == 0)).any(-1).expand(-1, self.rows)

    def _build_mask(self, window: int | None, repeat: int, like: Tensor) -> Tensor | None:
        seen = torch.zeros(len(self.spans), 1, self.rows, self.keys, dtype=torch.bool, device=like.device)
        for i, span in enumerate(self.spans):
            seen[i, 0, :, : span.keys] = reference.visible(span, window, like.device)
        if like.device.type == "cpu" and bool(seen.all()):
            return None
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)
        return mask.repeat(1, 1, repeat, 1) if repeat > 1 else mask


class GroupedAttention:
    """Attention of one batch; call it once a layer."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._groups: list[_Group] | None = None

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
        if softcap is not None or sinks is not None:
            return reference.paged_attention(
                q, k_pool, v_pool, self._batch, scaling=scaling, window=window, softcap=softcap, sinks=sinks
            )
        if self._groups is None:
            self._groups = _group(self._batch.spans, q.device)
        if len(self._groups) == 1:
            return self._attend(self._groups[0], q, k_pool, v_pool, scaling, window)
        out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[3])
        for group in self._groups:
            out[group.take] = self._attend(group, q[group.take], k_pool, v_pool, scaling, window)
        return out

    @staticmethod
    def _attend(group: _Group, q: Tensor, k_pool: Tensor, v_pool: Tensor, scaling: float, window: int | None) -> Tensor:
        """q: [B * R, heads, D]. Returns [B * R, heads, Dv]."""
        spans, rows, heads, kv_heads = len(group.spans), group.rows, q.shape[1], k_pool.shape[2]
        k, v = (
            gather(pool, group.slots, q.dtype).unflatten(0, (spans, group.keys)).transpose(1, 2)
            for pool in (k_pool, v_pool)
        )  # [B, kv_heads, K, D]
        broken = None
        if group.nodes:  # without draft nodes, every later row sees a broken key anyway
            broken = ~(k.isfinite().all(-1) & v.isfinite().all(-1)).all(1)  # [B, K]
            k, v = (part.masked_fill(broken[:, None, :, None], 0.0) for part in (k, v))
        q = q.view(spans, rows, heads, -1).transpose(1, 2)  # [B, heads, R, D]
        if rows > _PACKED_ROWS:
            causal = group.plain_prompt and (window is None or window >= group.keys)
            mask = None if causal else group.mask(window, 1, q)
            out = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=True)
        else:
            shared = heads // kv_heads
            q = q.reshape(spans, kv_heads, shared * rows, -1)
            out = scaled_dot_product_attention(q, k, v, group.mask(window, shared, q), scale=scaling)
            out = out.reshape(spans, heads, rows, -1)
        if broken is not None:
            out = out.masked_fill(group.sees(broken, window, q)[:, None, :, None], torch.nan)
        return out.transpose(1, 2).reshape(spans * rows, heads, -1)


def _group(spans: Sequence[Span], device: torch.device) -> list[_Group]:
    """Group spans with equal rows whose keys differ by less than a factor of two."""
    groups: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        groups[span.rows, span.keys.bit_length()].append(span)
    return [_Group(members, device) for members in groups.values()]
