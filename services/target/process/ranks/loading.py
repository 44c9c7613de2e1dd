"""Loading of one rank's part of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider.config import TargetConfig
from services.target.engine.memory import device_memory
from services.target.model.base import Model
from services.target.model.loading.load import load
from services.target.model.parallel.exchange import least_of_ranks


def load_part(folder: Path, config: TargetConfig) -> Model:
    """Load this rank's part, once the ranks have joined. Raises ConfigError.

    Rank 0 plans the KV cache of all ranks, so it learns how much less memory another device has free.
    """
    model = load(folder, config)
    memory = device_memory(model.device)
    return model if memory is None else replace(model, shortage=memory.free - least_of_ranks(memory.free))
