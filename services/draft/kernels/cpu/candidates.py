"""The most likely next tokens of each row, in a few passes over its logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from services.draft.kernels.cpu import library


def cpu_candidates(
    logits: jax.Array, sampling: Any, count: int, ids: jax.Array | None, vocab_limit: int
) -> tuple[jax.Array, jax.Array]:
    """As of model.programs.sampling.candidates. vocab_limit: ids from there on are padding."""
    size = (*logits.shape[:2], count)
    results = jax.ShapeDtypeStruct(size, jnp.int32), jax.ShapeDtypeStruct(size, jnp.float32)
    tokens, log_scores = library.call("candidates", *results)(
        logits.astype(jnp.float32), jnp.zeros(0, jnp.int32) if ids is None else ids, sampling.temperature,
        sampling.top_k, sampling.top_p, sampling.min_p, sampling.keys, limit=np.int32(min(vocab_limit, 2**31 - 1)),
    )  # fmt: skip
    return tokens, log_scores
