"""The device of a model, and its number format there."""

from __future__ import annotations

import logging
from typing import Any

import torch

from outrider.config import DType, check_device
from outrider.config.compatibility.on_cpu import FLOAT16_NOTE
from outrider.errors import ConfigError
from services.target.step.upload import use_device

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device of --device. Raises ConfigError if the machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'"{name}" is no device; write auto, cpu, cuda or cuda:1') from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name} is not supported; choose cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no device {name}; PyTorch sees {torch.cuda.device_count()} CUDA devices")
    use_device(device)
    return device


def pick_dtype(name: DType, settings: Any, device: torch.device, *, compiled: bool) -> torch.dtype:
    """The number format of --dtype. auto: the checkpoint's; on a CPU without kernels for it, float32.

    A CPU has no kernels for float16: it computes in bfloat16, which takes as much memory, or in float32.

    compiled: there are compiled kernels for these settings on a CPU
    """
    if name == "float16" and device.type == "cpu":
        chosen = "bfloat16" if compiled else "float32"
        log.warning("%s", FLOAT16_NOTE.format(chosen))
        return _DTYPES[chosen]
    if name != "auto":
        return _DTYPES[name]
    stored = settings.get_text_config().dtype or settings.dtype or torch.float32
    if device.type == "cpu" and not (stored == torch.bfloat16 and compiled):
        return torch.float32
    return stored
