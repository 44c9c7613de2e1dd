"""--deterministic: the flags it excludes, and the kernels it selects.

With it a row's logits have the same bits whatever else is in the batch, however its prompt was chunked, and whether it
was decoded plainly or verified as a draft node. On CPUs dense decoders have this property without the flag (native.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.kernels.cpu import library
from services.target.kernels.cpu.attention import paged
from services.target.model.attention import Probe
from services.target.model.deterministic import experts, invariant_mode

_FLAG = "--deterministic"


def check_flags(config: TargetConfig, device: torch.device) -> None:
    """Raise ConfigError for flags, or a machine, without batch invariance."""
    others = {
        "--attention-backend torch_native": config.attention_backend == "torch_native",
        "--enable-torch-compile": config.enable_torch_compile,
        f"--tp-size {config.tp_size}": config.tp_size > 1,
        f"--quantization {config.quantization}": config.quantization is not None and device.type == "cuda",
        "--speculative-accept-threshold-single": config.speculative_accept_threshold_single < 1.0,
        "--speculative-accept-threshold-acc": config.speculative_accept_threshold_acc < 1.0,
    }
    for other, given in others.items():
        if given:
            raise ConfigError(f"{_FLAG} does not go with {other}; leave one out")
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{_FLAG} needs the package triton on {device}, which is not installed")
    if device.type == "cpu":
        try:
            library.load()
        except library.Unavailable as reason:
            raise ConfigError(f"{_FLAG} needs the compiled kernels on a CPU, not available here: {reason}") from None


def prepare(module: Any, how: Mapping[str, Any], probe: Probe, device: torch.device) -> AbstractContextManager[Any]:
    """Prepare a model that runs module by module. Returns the context of its forward passes.

    how: the arguments of `from_pretrained`. Raises ConfigError for weights and layers without kernels.
    """
    if "device_map" in how:
        raise ConfigError(f"{_FLAG} has no kernels for weights that stay quantized; choose a checkpoint that is not")
    assert probe.dtype is not None, "a model was probed"
    number_format = str(probe.dtype).removeprefix("torch.")
    for layer, shape in probe.shapes.items():
        if device.type == "cpu" and not paged.serves(probe.dtype, shape.key_dim, shape.value_dim):
            raise ConfigError(
                f"{_FLAG} has no kernel for the attention of layer {layer} on a CPU, with heads of {shape.key_dim} "
                f"numbers as {number_format}; choose --dtype bfloat16 or float32, or leave it out"
            )
    module.set_experts_implementation(experts.NAME)
    return invariant_mode.of(device)
