"""The Pallas kernel for a device: its requirements, and the layout of the cache that it reads."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from outrider.errors import ConfigError
from services.draft.kernels.base import Backend
from services.draft.model.layers.config import LatentAttention, ModelConfig

_FLAG = "--draft-attention-backend pallas"
# The oldest NVIDIA GPUs for which Triton supports bfloat16 products.
_MIN_CAPABILITY = 8.0
# Width of a TPU register's row, and rows of the smallest tile of narrow numbers.
_TPU_LANES = 128
_TPU_ROWS = 8


def pallas_for(device: jax.Device, model: ModelConfig, dtype: Any, page_size: int) -> Backend:
    """The Pallas kernel for a device. dtype: of the cache. Raises ConfigError with the reason if none fits."""
    if device.platform == "gpu":
        capability = str(getattr(device, "compute_capability", ""))
        if re.fullmatch(r"\d+\.\d+", capability) and float(capability) < _MIN_CAPABILITY:
            raise ConfigError(
                f"{_FLAG} needs a GPU of compute capability {_MIN_CAPABILITY} or more, not {capability}; leave it out"
            )
        return "pallas_gpu"
    if device.platform != "tpu":
        raise ConfigError(f"{_FLAG} needs a GPU or a TPU, and the draft computes on {device.platform}; leave it out")
    if jnp.dtype(dtype) == jnp.float16:
        raise ConfigError(f"{_FLAG} does not support float16 on TPUs; set --draft-dtype bfloat16")
    latent = any(isinstance(layer.attention, LatentAttention) for layer in model.layers)
    if latent and page_size % _TPU_ROWS:
        raise ConfigError(
            f"{_FLAG} reads latent caches in rows of {_TPU_ROWS} tokens on TPUs; --draft-page-size must be a multiple "
            f"of {_TPU_ROWS}, not {page_size}"
        )
    return "pallas_tpu"


def with_cache_for(model: ModelConfig, backend: Backend) -> ModelConfig:
    """The same model with heads in the cache as the kernel reads them: on TPUs padded to whole rows of registers.

    XLA lays out narrower heads with slots innermost, and then copies the cache at every write.
    """
    if backend != "pallas_tpu":
        return model
    layers = []
    for layer in model.layers:
        numbers = layer.attention.kv_shape[-1]
        wide = replace(layer.attention, cached_dim=-(-numbers // _TPU_LANES) * _TPU_LANES)
        layers.append(replace(layer, attention=wide))
    return replace(model, layers=tuple(layers))
