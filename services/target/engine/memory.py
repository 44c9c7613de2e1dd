"""The memory plan of a loaded target: what the device has is measured, the division is outrider/placement/memory.py."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from outrider.config import TargetConfig
from outrider.placement.devices import free_host_memory
from outrider.placement.memory import CONTEXT_BYTES, MemoryPlan, cache_flags, plan_device, plan_host
from outrider.placement.step_sizes import step_sizes
from services.target.model.base import Model

log = logging.getLogger(__name__)


class DeviceMemory(NamedTuple):
    """Memory of an accelerator in bytes. weights: what this process has allocated on it."""

    total: int
    free: int
    weights: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of an accelerator; None for the host, whose memory is not divided beforehand."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # blocks that loading left behind are free
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_reserved(device))


def plan_memory(model: Model, config: TargetConfig) -> MemoryPlan:
    """The memory plan of a loaded model, which is logged. Raises ConfigError if the KV cache has no room."""
    memory = device_memory(model.device)
    if memory is None:
        ranks = config.tp_size // config.nnodes  # of this machine, which have as many caches
        free = max(0, free_host_memory() - model.mapped_bytes)
        plan = plan_host(free // ranks, model.token_bytes, **cache_flags(config))
    else:
        sizes = step_sizes(config, model.hidden_size, model.vocab_size)
        # With a fraction, this process's own context counts, too: the fraction is of all that the device has.
        own = 0 if config.mem_fraction_static is not None else CONTEXT_BYTES
        plan = plan_device(
            memory.total,
            memory.weights,
            model.token_bytes,
            working=sizes.working_bytes(model.dtype.itemsize),
            draft=config.draft_headroom_bytes or 0,
            taken=max(0, memory.total - memory.free - memory.weights - own) + model.shortage,
            **cache_flags(config),
        )
    log.info("memory of %s: %s", model.device, plan)
    return plan
