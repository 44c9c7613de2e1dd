"""Tensor parallelism by `transformers`: which models can be sharded, and the arguments that load a shard.

Each rank computes some heads and some columns of every layer, with the keys and values of its own heads, by the model's
own sharding plan. Partial sums are reduced twice a layer; the logits are gathered on every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from outrider.errors import ConfigError

_FLAG = "--tp-size"


def check_devices(tp_size: int, device: str) -> None:
    """Raise ConfigError if this machine has too few devices for the ranks. device: the value of --device."""
    if tp_size < 1:
        raise ConfigError(f"{_FLAG} must be 1 or more, not {tp_size}")
    if tp_size == 1:
        return
    wanted = "cuda" if device == "auto" and torch.cuda.is_available() else device
    if wanted.startswith("cuda"):
        if ":" in wanted:
            raise ConfigError(f"{_FLAG} {tp_size} takes the first {tp_size} devices; write --device cuda, not {device}")
        if tp_size > torch.cuda.device_count():
            raise ConfigError(f"{_FLAG} {tp_size}: PyTorch sees {torch.cuda.device_count()} CUDA devices; lower it")
    elif torch.cuda.is_available():
        raise ConfigError(f"{_FLAG} {tp_size} on the CPU of a machine with GPUs is not supported; use --device cuda")


def split(folder: Path, settings: Any, tp_size: int) -> dict[str, Any]:
    """The arguments of `from_pretrained` that load a rank's shard. Raises ConfigError for models without a plan."""
    if tp_size == 1:
        return {}
    text = settings.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"{folder}: transformers has no plan to split a {text.model_type} among ranks; start without {_FLAG}"
        )
    if getattr(settings, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise ConfigError(
            f"{folder}: quantized checkpoints cannot be split among ranks; start without {_FLAG}, "
            "or choose a checkpoint that is not quantized"
        )
    counts = {
        "q_proj": ("num_attention_heads", "attention heads"),
        "k_proj": ("num_key_value_heads", "key-value heads"),
        "experts.gate_up_proj": ("moe_intermediate_size", "columns of an expert"),
    }
    for layer, (name, words) in counts.items():
        count = getattr(text, name, None)
        if count and count % tp_size and any(rule.endswith(layer) for rule in plan):
            raise ConfigError(
                f"{_FLAG} {tp_size} does not divide the model's {count} {words}; choose a divisor of {count}"
            )
    return {"distributed_config": DistributedConfig(tp_size=tp_size)}
