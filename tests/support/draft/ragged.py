"""Random ragged batches for attention kernels: sessions of all lengths, pages in any order, trees in the scratch."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from services.draft.kernels.base import Context
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS


@dataclass(frozen=True)
class Batch:
    """A shape. heads: of queries, and of keys; sides: 1 where keys are their own values; window: rows seen at most."""

    sessions: int
    rows: int
    heads: tuple[int, int]
    dim: int
    page_size: int
    tokens: int  # of the longest session
    sides: int = 2
    dtype: str = "float32"
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None

    @property
    def pages(self) -> int:
        """Of a session's prefix KV."""
        return -(-self.tokens // self.page_size)

    def shapes(self, slots: int, dim: int | None = None) -> tuple:
        """Shapes of query, pool and context, for what compiles without data. dim: of the pool's heads, if wider."""
        spec = jax.ShapeDtypeStruct
        context = Context(
            spec((self.sessions, self.pages), jnp.int32),
            spec((self.sessions, self.rows), jnp.int32),
            spec((self.sessions, SCRATCH_SLOTS), jnp.int32),
            spec((self.sessions, self.rows, SCRATCH_SLOTS), jnp.bool_),
        )
        q = spec((self.sessions, self.rows, self.heads[0], self.dim), self.dtype)
        return q, spec((slots, self.sides, self.heads[1], dim or self.dim), self.dtype), context


def draw(batch: Batch, seed: int = 0) -> tuple[jax.Array, jax.Array, Context, dict]:
    """Query, pool, context and options. Slots of the pool that no row sees are NaN."""
    rng = np.random.default_rng(seed)
    sessions, rows, size = batch.sessions, batch.rows, batch.page_size
    scratch_pages = -(-SCRATCH_SLOTS // size)
    pages = 1 + rng.permutation(sessions * (batch.pages + scratch_pages)).reshape(sessions, -1)
    scratch = pages[:, batch.pages :, None] * size + np.arange(size)
    scratch = scratch.reshape(sessions, -1)[:, :SCRATCH_SLOTS]
    lengths = rng.integers(0, batch.tokens + 1, sessions)
    lengths[rng.integers(sessions)] = batch.tokens
    # Alternating sessions: a chunk of the prefix KV with causal visibility, and nodes, which see all of it and a tree.
    feeds = (np.arange(sessions) % 2 == 1)[:, None]
    visible = np.where(feeds, np.maximum(lengths[:, None] - rows + 1 + np.arange(rows), 0), lengths[:, None])
    mask = (rng.random((sessions, rows, SCRATCH_SLOTS)) < 0.2) & ~feeds[..., None]
    kept = np.where(np.arange(batch.pages) * size < lengths[:, None], pages[:, : batch.pages], 0)

    pool = rng.standard_normal(((1 + pages.size) * size, batch.sides, batch.heads[1], batch.dim)).astype(np.float32)
    seen = np.zeros(len(pool), bool)
    for i in range(sessions):
        prefix_kv = (pages[i, : batch.pages, None] * size + np.arange(size)).reshape(-1)
        seen[prefix_kv[: lengths[i]]] = True
        seen[scratch[i][mask[i].any(axis=0)]] = True
    pool[~seen] = np.nan
    options: dict = {"softcap": batch.softcap}
    if batch.window:
        options["since"] = jnp.asarray(np.maximum(visible - batch.window, 0), jnp.int32)
    if batch.sinks:
        options["sinks"] = jnp.asarray(rng.standard_normal(batch.heads[0]), batch.dtype)
    context = Context(*(jnp.asarray(array, jnp.int32) for array in (kept, visible, scratch)), jnp.asarray(mask))
    q = jnp.asarray(rng.standard_normal((sessions, rows, batch.heads[0], batch.dim)), batch.dtype)
    return q, jnp.asarray(pool, batch.dtype), context, options
