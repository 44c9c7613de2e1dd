"""--quantization: weights are quantized while loading; the computation keeps its number format.

On CUDA with `torchao`: one scale a row, or a group of 128 numbers in int4; linear layers only, without the LM head. On
the CPU with our own kernels (kernels/cpu/matrices/weights.py): int8 and int4, with the LM head in int8. Quantized
checkpoints, which are unpacked on the CPU, may be packed again; 4-bit weights in blocks of 32 or more are reproduced
exactly.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from torch import nn

from outrider.config import Quantization
from outrider.errors import ConfigError
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import Format

log = logging.getLogger(__name__)

_FP8_CAPABILITY = (8, 9)
_EXPERTS = 3  # number of dimensions of a parameter that holds all experts of a layer
_WIDE = (torch.float32, torch.bfloat16, torch.float16)
_INT4_PACKAGE = "mslk"  # has torchao's int4 kernels


def quantization_arguments(
    choice: Quantization | None, settings: Any, device: torch.device, ranks: int = 1
) -> dict[str, Any]:
    """The arguments of `from_pretrained` that quantize a checkpoint's weights. Raises ConfigError.

    ranks: tensor-parallel ones. With several, `quantize_loaded` quantizes each rank's parts instead.
    """
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
            raise ConfigError(f"{flag} needs the compiled kernels on a CPU, not available here: {reason}") from None
        return {}
    if getattr(settings, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise ConfigError(f"{flag}: the checkpoint is quantized already; leave the flag out")
    if choice == "fp8" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigError(f"{flag} needs a GPU of compute capability 8.9 or more; choose int8")
    wanted = ["torchao", *([_INT4_PACKAGE] if choice == "int4" else [])]
    missing = [package for package in wanted if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{flag} needs {' and '.join(missing)}; `pip install {' '.join(missing)}`, or leave it out")
    if ranks > 1:
        return {}
    from transformers import TorchAoConfig

    return {"quantization_config": TorchAoConfig(_torchao(choice)), "device_map": {"": device}}


def _torchao(choice: Quantization) -> Any:
    import torchao.quantization as ao

    how = {"fp8": ao.Float8WeightOnlyConfig, "int8": ao.Int8WeightOnlyConfig, "int4": ao.Int4WeightOnlyConfig}
    return how[choice]()


def quantize_loaded(choice: Quantization | None, module: Any) -> None:
    """Quantize the linear layers of a loaded model on CUDA, without the LM head."""
    if choice is None:
        return
    from torchao.quantization import quantize_

    head = module.get_output_embeddings()
    quantize_(module, _torchao(choice), filter_fn=lambda layer, _: type(layer) is nn.Linear and layer is not head)


def warn_about_experts(choice: Quantization | None, module: nn.Module) -> None:
    """Log a warning if a model has experts, which stay unquantized although they are most of its weights."""
    if choice is None:
        return
    wide = sum(tensor.nbytes for tensor in module.parameters() if tensor.ndim == _EXPERTS and tensor.dtype in _WIDE)
    if wide:
        log.warning("--quantization %s leaves experts as they are; they take %.0f MB", choice, wide / 1e6)


def cpu_format(choice: str | None) -> Format | None:
    """The CPU kernels' number format for --quantization; None: the model's own format."""
    return {"int8": Format.INT8, "int4": Format.INT4}.get(choice or "")
