"""The plain twin of ragged paged attention with a tree mask: session by session, with an explicit softmax.

Every other attention kernel is tested against it. It also serves the rare models whose attention has soft-capped scores
or sinks, which PyTorch's fused attention cannot express.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.target.kernels.pools import gather
from services.target.step.batch import Batch
from services.target.step.layout import Span


def visible(span: Span, window: int | None, device: torch.device) -> Tensor:
    """The tree mask: the keys that each row of a span sees. Returns [rows, keys] bool.

    window: number of tokens that a row sees, itself included
    """
    key_positions = torch.arange(span.keys, device=device)
    slot_positions = key_positions[span.start :, None]  # [rows, 1]
    mask = key_positions[None, :] <= slot_positions.clamp(max=span.start + span.committed - 1)
    positions = torch.from_numpy(span.positions).to(device)
    if span.nodes:
        own = span.start + span.committed
        mask[span.committed :, own:] = torch.from_numpy(span.tree_mask).to(device)
    if window is not None:
        key_positions = torch.cat([key_positions[: span.start], positions])
        mask &= key_positions[None, :] > positions[:, None] - window
    return mask


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: Batch,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every row over the pages of its session.

    q: [T, heads, D]; k_pool, v_pool: [pages, page_size, kv_heads, D or Dv], with the batch's own rows already written,
    in any format of pools.py, converted when read; heads is a multiple of kv_heads. window: see `visible`. softcap:
    scores become softcap * tanh(score / softcap). sinks: [heads], scores of an extra key without value. Scores and
    softmax are float32 (float64 if q is). A key or value that is not finite makes the rows that see it NaN, and no
    others. Returns [T, heads, Dv] in q's dtype.
    """
    kv_heads = k_pool.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[3])
    for span in batch.spans:
        slots = torch.from_numpy(span.slots).to(q.device)
        queries = q[span.first : span.first + span.rows].to(wide).unflatten(1, (kv_heads, -1))  # [rows, kv, group, D]
        scores = torch.einsum("rhgd,khd->hgrk", queries, gather(k_pool, slots, wide)) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = visible(span, window, q.device)
        weights = _softmax(scores.masked_fill(~seen, -torch.inf), sinks)
        attended = _combine(weights, gather(v_pool, slots, wide), seen)
        out[span.first : span.first + span.rows] = attended.flatten(1, 2).to(q.dtype)
    return out


def _combine(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """weights: [kv, group, rows, keys]; values: [keys, kv, Dv]; seen: [rows, keys]. Returns [rows, kv, group, Dv]."""
    broken = ~values.isfinite().flatten(1).all(1)  # 0 times these is NaN
    combined = torch.einsum("hgrk,khd->rhgd", weights, values.masked_fill(broken[:, None, None], 0.0))
    return combined.masked_fill((seen & broken).any(1)[:, None, None, None], torch.nan)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys and sinks, without the sinks' weights. scores: [kv, group, rows, keys]; sinks: [heads]."""
    if sinks is None:
        return scores.softmax(-1)
    share = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, share], dim=-1).softmax(-1)[..., :-1]
