"""What the engine knows of a model: its facts, and something that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.target.batch import Batch
from services.target.kv_cache import KVCache, LayerShape


class Runner(Protocol):
    """Computes a batch with a loaded model."""

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Write the batch's keys and values, and return the logits of its sampled rows. [R, V]."""
        ...


@dataclass(frozen=True)
class Model:
    """A loaded model and the facts of it that others need.

    shapes: what each layer stores for a token; cache_dtype: in which format
    context_length: longest sequence, in tokens; eos_token_ids: the model's own end-of-sequence ids
    """

    runner: Runner
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    shapes: tuple[LayerShape, ...]
