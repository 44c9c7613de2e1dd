"""Tensor parallelism by `transformers`: which models can be divided among ranks, and the arguments that load a part.

Each rank computes some heads and some columns of every layer, with the keys and values of its own heads, by the model's
own plan (parallel/split.py). Partial sums are added up twice a layer; the logits are gathered on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.distributed import DistributedConfig

from outrider.errors import ConfigError
from services.target.model.parallel.split import shards_of

log = logging.getLogger(__name__)

_FLAG = "--tp-size"
_MOST_REPEATED = 0.5  # of the numbers that a rank holds, those that every rank holds, before a warning


def check_devices(devices: Sequence[str]) -> None:
    """Raise ConfigError if this machine lacks a device of its ranks. devices: one for each rank."""
    count = torch.cuda.device_count()
    cuda = [device for device in devices if device.startswith("cuda")]
    missing = [device for device in cuda if int(device.partition(":")[2] or 0) >= count]
    if missing:
        raise ConfigError(
            f"{_FLAG}: there is no device {missing[0]}; PyTorch sees {count} CUDA devices: lower {_FLAG}, or choose "
            "others with --device"
        )
    if not cuda and count:
        raise ConfigError(
            f"{_FLAG} on the CPU of a machine with GPUs is not supported; use --device cuda, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES="
        )


def split(folder: Path, settings: Any, tp_size: int) -> dict[str, Any]:
    """The arguments of `from_pretrained` that load a rank's part. Raises ConfigError for models without a plan."""
    if tp_size == 1:
        return {}
    text = settings.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"{folder}: transformers has no plan to split a {text.model_type} among ranks; start without {_FLAG}"
        )
    counts = {
        "q_proj": ("num_attention_heads", "attention heads"),
        "k_proj": ("num_key_value_heads", "key-value heads"),
        "kv_b_proj": ("num_attention_heads", "attention heads"),
        "experts.gate_up_proj": ("moe_intermediate_size", "columns of an expert"),
    }
    for layer, (name, words) in counts.items():
        count = getattr(text, name, None)
        if count and count % tp_size and any(rule.endswith(layer) for rule in plan):
            raise ConfigError(
                f"{_FLAG} {tp_size} does not divide the model's {count} {words}; choose a divisor of {count}"
            )
    return {"distributed_config": DistributedConfig(tp_size=tp_size)}


def warn_about_copies(module: nn.Module) -> None:
    """Log a warning if most of a rank's weights are copies, because the plan of `transformers` divides few layers."""
    shards = shards_of(module)
    held = {name: parameter.nbytes for name, parameter in module.named_parameters()}
    copies = sum(size for name, size in held.items() if name not in shards)
    if shards and copies > _MOST_REPEATED * sum(held.values()):
        log.warning(
            "%s saves little memory: %.0f of the %.0f MB of weights of each rank are the same, because the plan of "
            "transformers divides few layers of this model", _FLAG, copies / 1e6, sum(held.values()) / 1e6,
        )  # fmt: skip
