"""What the engine knows of a model: its facts, and something that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.target.kernels.kv_cache import KVCache, LayerShape, token_bytes
from services.target.model.head import Head
from services.target.step.batch import Batch
from services.target.step.programs import LoopIteration


class Outputs(NamedTuple):
    """What a forward pass says.

    logits:   [R, V], of the batch's sampled rows
    features: [n * F, W], of the rows of `batch.capture`: its states side by side, as wide as the model each; None
              without. Step after step of n: one, or more of a burst
    tokens:   [n * drawn] int64, drawn by `batch.draws`, step after step; None if the runner cannot
    iterations: outcomes of a fused loop, whose tokens are all that it committed
    """

    logits: Tensor
    features: Tensor | None = None
    tokens: NDArray[np.int64] | None = None
    iterations: Sequence[LoopIteration] = ()


class Runner(Protocol):
    """Computes a batch with a loaded model."""

    def forward(self, batch: Batch, cache: KVCache) -> Outputs:
        """Write the batch's keys and values, and return what `Outputs` says. Must serve every `batch.capture`."""
        ...

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Names, as checkpoints have them, and shapes of what `update` can replace; empty if nothing can."""
        ...

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace weights, any part of `weights()`, whose names and shapes the caller has checked.

        tensors: of any float dtype, on the host. Tied weights and repacked copies follow. Addresses of plain
        parameters stay, so that captured programs go on with the new values.
        """
        ...


@dataclass(frozen=True)
class Model:
    """A loaded model and the facts of it that others need.

    shapes: what each layer stores for a token; cache_dtype: in which format
    hidden_size: width of a hidden state
    context_length: longest sequence, in tokens; eos_token_ids: the model's own end-of-sequence ids
    tokenizer_file: tokenizer.json of its folder, if it has one
    copied: True if the runner computes narrow bursts, with a copy of the weights in fewer bits
    head: what drafts behind it, if anything
    prompt_lookup: True if what a session's own text repeats is verified, too
    """

    runner: Runner
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    shapes: tuple[LayerShape, ...]
    tokenizer_file: Path | None = None
    copied: bool = False
    head: Head | None = None
    prompt_lookup: bool = False

    @property
    def drafts(self) -> bool:
        """True if it can guess its next tokens."""
        return self.copied or self.head is not None

    @property
    def _stored(self) -> tuple[LayerShape, ...]:
        return self.shapes if self.head is None else (*self.shapes, self.head.shape)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in the cache."""
        states = 0 if self.head is None else self.head.states.token_bytes
        return states + token_bytes(self._stored, self.cache_dtype)

    def new_cache(self, pages: int, page_size: int) -> KVCache:
        """An empty cache of so many usable pages."""
        states = None if self.head is None else self.head.states
        return KVCache(self._stored, pages, page_size, self.cache_dtype, self.device, states)
