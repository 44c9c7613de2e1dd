"""Running a model as `transformers` defines it, module by module, with our attention inside."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from services.target.kernels.dispatch import Planner
from services.target.kernels.kv_cache import KVCache
from services.target.model import attention
from services.target.model.base import Outputs
from services.target.model.capture import HiddenStateHooks, joined
from services.target.model.weight_slots import WeightSlots
from services.target.step.batch import Batch


class ModuleRunner:
    """A `Runner` for any causal LM of `transformers` that uses its attention interface."""

    compilable = True
    """True if torch.compile has something to compile."""

    def __init__(self, module: nn.Module, planner: Planner, around: AbstractContextManager[Any] | None = None) -> None:
        """planner: makes the attention of a batch. around: context of every forward pass; see invariant_mode.py."""
        self.module = module
        self.planner = planner
        self._around = nullcontext() if around is None else around
        self._taps: HiddenStateHooks | None = None  # made when features are first asked for

    def forward(self, batch: Batch, cache: KVCache) -> Outputs:
        """Write the batch's keys and values, and return the logits and features that it asks for."""
        return self.run(batch, cache, self.planner)

    def run(self, batch: Batch, cache: KVCache, planner: Planner) -> Outputs:
        """`forward` with another attention."""
        if batch.capture is None:
            return Outputs(self._logits(batch, cache, planner))
        if self._taps is None:
            self._taps = HiddenStateHooks(self.module)
        with self._taps.capturing(batch.capture) as states:
            logits = self._logits(batch, cache, planner)
        return Outputs(logits, joined(states))

    def _logits(self, batch: Batch, cache: KVCache, planner: Planner) -> Tensor:
        with attention.paged(batch, cache, planner), self._around:
            output = self.module(
                input_ids=batch.ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.sampled,
            )
        logits: Tensor = output.logits[0]
        return logits

    def slots(self) -> WeightSlots:
        """The slots of the weights."""
        return WeightSlots(self.module)

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the weights, as checkpoints have them."""
        return self.slots().shapes

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace weights in place, tied and packed ones included."""
        self.slots().write(tensors)
