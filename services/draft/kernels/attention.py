"""Ragged paged attention with an ancestor mask: one function, several kernels.

A row sees the first tokens of its session's trunk, read through the page table, and those scratch slots that its mask
names, which hold its ancestors in the speculation tree and itself.

    plain     in jax.numpy, for every device; what the others are tested against
"""

from __future__ import annotations

import jax

from outrider.config import DraftAttentionBackend
from services.draft.kernels.base import Backend, Context, Paging
from services.draft.kernels.plain import plain_attention


def choose(wanted: DraftAttentionBackend) -> Backend:
    """The kernel for this process's devices. wanted: --draft-attention-backend. Raises ConfigError."""
    return "plain" if wanted == "auto" else wanted


def attention(
    q: jax.Array,
    pool: jax.Array,
    context: Context,
    paging: Paging,
    *,
    since: jax.Array | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attend from each row to what it sees.

    q: [S, Q, heads, D]; pool: [slots, 2, kv_heads, D], keys and values of one layer, or [slots, 1, kv_heads, D] where
    a key is its own value. since: [S, Q] int32, the first trunk token that each row sees; all by default.
    sinks: [heads], a further score, of nothing. softcap: bound of scores, which tanh bends towards it. Returns
    [S, Q, heads, D]; rows that see nothing give 0.
    """
    return plain_attention(q, pool, context, paging.page_size, since=since, sinks=sinks, softcap=softcap)
