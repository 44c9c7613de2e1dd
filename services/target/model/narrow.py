"""--quantization: weights made narrower as they load; the computation keeps its number format.

On CUDA by `torchao`: each row of a weight gets a scale, each group of 128 numbers in int4; linear layers alone, not the
head. On the CPU by our own kernels, see kernels/cpu/weights.py: int8 and int4, with the head in int8. Published
quantized weights, which are unpacked there, may be packed again so; 4 bits in blocks of 32 and more stay as they were.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from outrider.config import Quantization, TargetConfig
from outrider.errors import ConfigError
from services.target.kernels.cpu import library
from services.target.kernels.cpu.weights import Format

_LEAST_BYTES = 32e6  # of linear layers: smaller ones are read from caches, where narrower ones gain nothing

_FP8_CAPABILITY = (8, 9)
_INT4_PACKAGE = "mslk"  # where torchao's int4 kernels are


def narrowed(choice: Quantization | None, settings: Any, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` must be told to narrow the weights of a checkpoint. Raises ConfigError."""
    if choice is None:
        return {}
    flag = f"--quantization {choice}"
    text = settings.get_text_config()
    if device.type != "cuda":
        if choice == "fp8":
            raise ConfigError(f"{flag} needs a CUDA device, not {device}; choose int8 or int4")
        try:
            library.load()
        except library.Unavailable as reason:
            raise ConfigError(f"{flag} needs the compiled kernels on a CPU, which cannot be had: {reason}") from None
        return {}
    if getattr(settings, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise ConfigError(f"{flag}: the checkpoint is quantized already; leave the flag out")
    if choice == "fp8" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigError(f"{flag} needs a GPU of compute capability 8.9 or more; choose int8")
    wanted = ["torchao", *([_INT4_PACKAGE] if choice == "int4" else [])]
    missing = [package for package in wanted if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{flag} needs {' and '.join(missing)}; `pip install {' '.join(missing)}`, or leave it out")

    import torchao.quantization as ao
    from transformers import TorchAoConfig

    how = {"fp8": ao.Float8WeightOnlyConfig, "int8": ao.Int8WeightOnlyConfig, "int4": ao.Int4WeightOnlyConfig}
    return {"quantization_config": TorchAoConfig(how[choice]()), "device_map": {"": device}}


def cpu_format(choice: Quantization | None) -> Format | None:
    """The kernels' number format for a choice that `narrowed` let pass on the CPU; None is the model's own."""
    return {"int8": Format.INT8, "int4": Format.INT4}.get(choice or "")


def own_drafts(config: TargetConfig, module: Any, reason: str | None) -> tuple[bool, Format | None]:
    """Whether the target drafts by itself, and the format of the copy of the weights that it does it with, if any.

    Without a copy, it drafts from the text alone. reason: why the model is no compiled program, if it is none. Raises
    ConfigError.
    """
    choice = config.self_draft
    if choice == "off":
        return False, None
    # Beside weights of eight bits a copy in four saves too little for its own steps: what texts repeat costs nothing.
    wide = config.quantization is None
    wanted = choice if choice != "auto" else "int4" if wide else "text"
    against = reason
    if against is None and config.fixed_hints:
        against = "--speculative-num-draft-tokens and --speculative-always say what is verified"
    narrower = wanted != "text" and config.quantization not in ("int4", wanted)
    if against is None and choice in ("int4", "int8") and not narrower:
        against = f"with --quantization {config.quantization} the weights are as narrow themselves"
    if choice != "auto" and against is not None:
        raise ConfigError(f"--self-draft {choice}: {against}; leave it out")
    layers = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    if against is not None or (choice == "auto" and sum(weight.nbytes for weight in layers) < _LEAST_BYTES):
        return False, None
    return True, cpu_format(wanted) if narrower else None
