"""The choice of a model's runner: a compiled program on CPUs, fused kernels on CUDA, else its own modules."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.kernels.dispatch import Planner
from services.target.model import attention, native
from services.target.model.base import Runner
from services.target.model.cuda import graphs
from services.target.model.deterministic import selection as deterministic
from services.target.model.linear import pack
from services.target.model.loading.self_speculation import plan_self_speculation
from services.target.model.loading.weight_quantization import cpu_format
from services.target.model.modules import ModuleRunner
from services.target.model.stored.source import WeightSource

log = logging.getLogger(__name__)


def choose_runner(
    module: Any,
    how: dict[str, Any],
    probe: attention.Probe,
    planner: Planner,
    cache_dtype: torch.dtype,
    context_length: int,
    config: TargetConfig,
    device: torch.device,
    source: WeightSource | None = None,
    origin: str | None = None,
) -> Runner:
    """The runner of a model. how: the arguments of `from_pretrained`. Raises ConfigError for its flags.

    source: of the weights, if they are not in the module. origin: as of native.program_of
    """
    reason: str | None = "it needs compiled kernels on a CPU, without --tp-size and --enable-torch-compile"
    if device.type == "cpu" and not config.enable_torch_compile:
        if config.tp_size == 1:
            reason = native.unsupported_reason(module, config.attention_backend, cache_dtype)
        means = plan_self_speculation(config, module, reason, source)
        if reason is None:
            return native.program_of(
                module, probe, cache_dtype, context_length, cpu_format(config.quantization), copied=means.copied,
                prompt_lookup=means.prompt_lookup, head=means.head, source=source, origin=origin,
            )  # fmt: skip
        assert source is None, "a description is loaded only if its model runs as a program"
        log.info("running module by module: %s", reason)
        pack(module, cpu_format(config.quantization))
    elif config.quantization is not None and device.type == "cpu":
        raise ConfigError("--quantization on a CPU does not go with --enable-torch-compile; leave one of them out")
    plan_self_speculation(config, module, reason)  # raises if the flags ask for self-speculation
    if device.type == "cuda" and not config.deterministic:
        fused = _fused(module, probe, planner, context_length)
        if fused is not None:
            return graphs.wrap(fused, config, device)
    around = deterministic.prepare(module, how, probe, device) if config.deterministic else None
    return graphs.wrap(ModuleRunner(module, planner, around), config, device)


def _fused(module: Any, probe: attention.Probe, planner: Planner, context_length: int) -> ModuleRunner | None:
    """The model with fused kernels; None if there are none for it."""
    if importlib.util.find_spec("triton") is None:
        return None
    from services.target.model.cuda import fused

    reason = fused.unsupported_reason(module)
    if reason is not None:
        log.info("running module by module: %s", reason)
        return None
    runner = fused.FusedRunner(module, planner, probe, context_length)
    torch.cuda.empty_cache()  # frees the weights that were copied; the KV cache takes the free memory
    return runner
