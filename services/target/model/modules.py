"""Running a model as `transformers` defines it, module by module, with our attention inside."""

from __future__ import annotations

from torch import Tensor, nn

from services.target.batch import Batch
from services.target.kv_cache import KVCache
from services.target.model import attention


class ModuleRunner:
    """A `Runner` for any causal LM of `transformers` that uses its attention interface."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Write the batch's keys and values, and return the logits of its sampled rows. [R, V]."""
        with attention.paged(batch, cache):
            output = self.module(
                input_ids=batch.ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.sampled,
            )
        logits: Tensor = output.logits[0]
        return logits
