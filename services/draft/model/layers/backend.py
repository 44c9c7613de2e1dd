"""Ragged paged attention with an ancestor mask: one function, several kernels.

A row sees the first tokens of its session's trunk, read through the page table, and those scratch slots that its mask
names, which hold its ancestors in the speculation tree and itself.

    plain       in jax.numpy, for every device; what the others are tested against
    cpu         compiled C++, beside which products, cache and candidates are compiled, too
    pallas_gpu  pages read where they lie, compiled by Triton
    pallas_tpu  the same, compiled by Mosaic
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp

from outrider.config import DraftAttentionBackend
from outrider.errors import ConfigError
from services.draft.kernels.base import Backend, Context, Paging
from services.draft.kernels.cpu import library
from services.draft.kernels.cpu.attention import WIDEST, cpu_attention
from services.draft.kernels.plain import plain_attention
from services.draft.model.layers.config import ModelConfig
from services.draft.model.layers.pallas_backend import pallas_for

log = logging.getLogger(__name__)


def choose(
    wanted: DraftAttentionBackend, device: jax.Device, model: ModelConfig, dtype: Any, page_size: int
) -> Backend:
    """The kernel for a model on a kind of device. wanted: --draft-attention-backend. Raises ConfigError."""
    if wanted == "plain":
        return "plain"
    if wanted == "cpu" or (wanted == "auto" and device.platform == "cpu"):
        return _compiled(wanted, device, model, dtype)
    try:
        return pallas_for(device, model, dtype, page_size)
    except ConfigError as error:
        if wanted == "pallas":
            raise
        log.warning("attention is computed with XLA's operations: %s", error)
        return "plain"


def _compiled(wanted: DraftAttentionBackend, device: jax.Device, model: ModelConfig, dtype: Any) -> Backend:
    reason = _missing(device, model, dtype)
    if reason is None:
        return "cpu"
    if wanted == "cpu":
        raise ConfigError(f"--draft-attention-backend cpu cannot be had: {reason}")
    log.warning("the draft runs on plain JAX, several times slower: %s", reason)
    return "plain"


def _missing(device: jax.Device, model: ModelConfig, dtype: Any) -> str | None:
    """Why the compiled kernels for CPUs cannot be had; None if they can."""
    if device.platform != "cpu":
        return f"the draft computes on {device.platform}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"they compute in float32 and bfloat16, not in {jnp.dtype(dtype).name}; see --draft-dtype"
    if (widest := max((layer.attention.kv_shape[-1] for layer in model.layers), default=0)) > WIDEST:
        return f"they have room for heads of {WIDEST} numbers, not of {widest}"
    try:
        library.load()
    except library.Unavailable as error:
        return str(error)
    return None


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
    options: dict[str, Any] = {"since": since, "sinks": sinks, "softcap": softcap}
    match paging.backend:
        case "cpu":
            return cpu_attention(q, pool, context, paging.page_size, **options)
        case "pallas_gpu":
            from services.draft.kernels.pallas_gpu import gpu_attention

            return gpu_attention(q, pool, context, paging.page_size, **options, interpret=paging.interpret)
        case "pallas_tpu":
            from services.draft.kernels.pallas_tpu import tpu_attention

            return tpu_attention(q, pool, context, paging.page_size, **options, interpret=paging.interpret)
        case _:
            return plain_attention(q, pool, context, paging.page_size, **options)
