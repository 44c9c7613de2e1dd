"""The choice of a model's runner: a compiled program on CPUs, fused kernels on CUDA, else its own modules."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.native import vectors
from services.target.kernels.cpu import library
from services.target.kernels.dispatch import Planner
from services.target.model import attention, native
from services.target.model.base import Runner
from services.target.model.cuda import graphs
from services.target.model.deterministic import selection as deterministic
from services.target.model.eagle_head_weights import read_eagle_head
from services.target.model.linear import pack
from services.target.model.loading.self_speculation import SelfSpeculationPlan, plan_self_speculation
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
) -> Runner:
    """The runner of a model. how: the arguments of `from_pretrained`. Raises ConfigError for its flags.

    source: of the weights, if they are not in the module
    """
    reason: str | None = "it needs compiled kernels on a CPU, without --tp-size and --enable-torch-compile"
    if device.type == "cpu" and not config.enable_torch_compile:
        if config.tp_size == 1:
            reason = native.unsupported_reason(module, config.attention_backend, cache_dtype)
        means = plan_self_speculation(config, module, reason, source)
        if reason is None:
            return _program(module, probe, cache_dtype, context_length, config, means, source)
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


def _program(
    module: Any,
    probe: attention.Probe,
    cache_dtype: torch.dtype,
    context_length: int,
    config: TargetConfig,
    means: SelfSpeculationPlan,
    source: WeightSource | None,
) -> native.ProgramRunner:
    """The model as a compiled program, with what self-speculation needs."""
    head = None
    if means.head is not None:
        vocab, hidden = module.get_input_embeddings().weight.shape
        head = read_eagle_head(means.head, len(probe.shapes), hidden, vocab, context_length)
    runner = native.ProgramRunner(
        module, probe, cpu_format(config.quantization), context_length, cache_dtype, means.copied,
        prompt_lookup=means.prompt_lookup, head=head, source=source,
    )  # fmt: skip
    if runner.kinds:
        kept = ", ".join(f"{count} in {kind}" for kind, count in sorted(runner.kinds.items()))
        log.info("weights keep the number formats of their file: %s", kept)
    unit = " and a matrix unit (AMX)" if library.load().outrider_has_matrix_unit() else ""
    log.info(
        "running as a compiled program, by %s%s; a step reads %.0f MB of weights",
        vectors.chosen().name.upper(), unit, runner.weight_bytes / 1e6,
    )  # fmt: skip
    if runner.drafts:
        drafts = "a quantized copy" if runner.copied else "a local EAGLE head"
        log.info("self-speculation with %s, which reads %.0f MB a draft token", drafts, runner.draft_bytes / 1e6)
    torch.set_num_threads(1)  # the program has its own threads, and PyTorch's would spin next to them
    return runner


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
