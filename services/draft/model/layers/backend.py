"""Ragged paged attention with an ancestor mask: one function, several kernels.

A row attends to the first tokens of its session's prefix KV, read through the page table, and to the scratch slots in
its mask, which hold its ancestors in the draft tree and itself.

    plain       in jax.numpy, for every device; the reference of the others
    cpu         compiled C++, together with compiled products, cache updates and candidates
    pallas_gpu  reads pages in place, compiled by Triton
    pallas_tpu  reads pages in place, compiled by Mosaic

A new kernel is a module in services/draft/kernels that is entered here.
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
    """The attention kernel for a model on a device. wanted: --draft-attention-backend. Raises ConfigError."""
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
        raise ConfigError(f"--draft-attention-backend cpu is not available: {reason}")
    log.warning("the draft runs on plain JAX, several times slower: %s", reason)
    return "plain"


def _missing(device: jax.Device, model: ModelConfig, dtype: Any) -> str | None:
    """Why the compiled CPU kernels are not available; None if they are."""
    if device.platform != "cpu":
        return f"the draft computes on {device.platform}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"they compute in float32 and bfloat16, not in {jnp.dtype(dtype).name}; see --draft-dtype"
    if (widest := max((layer.attention.kv_shape[-1] for layer in model.layers), default=0)) > WIDEST:
        return f"they support heads of at most {WIDEST} dimensions, not of {widest}"
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
    """Attention of each row.

    q: [S, Q, heads, D]; pool: [slots, 2, kv_heads, D], keys and values of one layer, or [slots, 1, kv_heads, D] where
    keys are also the values. since: [S, Q] int32, the first token of the prefix KV that each row attends to; default 0.
    sinks: [heads], score of an additional key without a value. softcap: bound of the scores by tanh. Returns
    [S, Q, heads, D]; rows without visible keys give 0.
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
