"""The interface between the engine and a model: its properties, and the runner that computes batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape, token_bytes
from services.target.model.eagle_head import EagleHead
from services.target.step.batch import Batch, Capture
from services.target.step.programs import LoopIteration


class Outputs(NamedTuple):
    """The result of a forward pass of n steps; n > 1 with multi-step decoding.

    logits:   [R, V], of the batch's sampled rows in the last step
    features: [n * F, W], states of the rows of `batch.capture` side by side, step after step; None without a capture
    tokens:   [n * sample_count] int64, samples of `batch.sampling`, step after step; None if the runner does not sample
    iterations: of a fused speculation loop, whose committed tokens are `tokens`
    """

    logits: Tensor
    features: Tensor | None = None
    tokens: NDArray[np.int64] | None = None
    iterations: Sequence[LoopIteration] = ()


class Runner(Protocol):
    """Computes a batch with a loaded model."""

    def forward(self, batch: Batch, cache: KVCache) -> Outputs:
        """Write the batch's keys and values and compute its outputs. Must support every `batch.capture`."""
        ...

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Checkpoint names and shapes of the weights that `update` can replace; empty if none."""
        ...

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some of `weights()`. The caller has checked names and shapes. ConfigError: nothing has changed.

        tensors: of any float dtype, on the host. Updates tied weights and packed copies, too. Addresses of plain
        parameters do not change, so that captured programs read the new values.
        """
        ...


@runtime_checkable
class CapturesSteps(Protocol):
    """A `Runner` that captures steps once, and replays them. Plain steps are captured before it serves."""

    def expect(self, capture: Capture) -> None:
        """Steps that return such hidden states will come, of any rows: they are due. Nothing changes if they were."""
        ...

    @property
    def due(self) -> int:
        """Number of steps to capture. Until then they run uncaptured."""
        ...

    def capture_next(self) -> None:
        """Capture one of them, which takes longer than many steps. No step may be in flight."""
        ...


@runtime_checkable
class CapturesAhead(Protocol):
    """A `Runner` that captures its plain steps before it serves."""

    def capture(self, cache: KVCache, device: torch.device) -> None:
        """Capture them. No step may be in flight."""
        ...


@dataclass(frozen=True)
class Model:
    """A loaded model and its properties.

    shapes: what each layer stores for a token; cache_dtype: format of the cache
    hidden_size: width of a hidden state
    context_length: longest sequence, in tokens; eos_token_ids: the model's own end-of-sequence ids
    tokenizer_file: tokenizer.json of its folder, if it has one
    copied: True if the runner can draft with a copy of the weights in fewer bits (quantized self-draft)
    head: the local EAGLE head, if there is one; not beside a copy
    prompt_lookup: True if prompt lookup drafts for it, too
    shortage: bytes that another tensor-parallel rank's device has less free than this one
    kinds: number formats of its file that weights keep, with the number of weights
    step_bytes: of weights that a step reads; 0 if it is not known. mapped_bytes: of weights in a file's pages, which
    the system counts as free
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
    head: EagleHead | None = None
    prompt_lookup: bool = False
    shortage: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    step_bytes: int = 0
    mapped_bytes: int = 0

    @property
    def drafts(self) -> bool:
        """True if it can draft for itself."""
        return self.copied or self.head is not None

    @property
    def _stored(self) -> tuple[LayerShape, ...]:
        return self.shapes if self.head is None else (*self.shapes, self.head.shape)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the cache."""
        states = 0 if self.head is None else self.head.states.token_bytes
        return states + token_bytes(self._stored, self.cache_dtype)

    def new_cache(self, pages: int, page_size: int) -> KVCache:
        """An empty cache. pages: usable pages."""
        states = None if self.head is None else self.head.states
        return KVCache(self._stored, pages, page_size, self.cache_dtype, self.device, states)
