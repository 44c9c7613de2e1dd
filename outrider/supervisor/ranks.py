"""What a dry run can see of a checkpoint that tensor-parallel ranks cannot divide.

The target checks it by the plan of `transformers` when it loads (services/target/model/loading/shards.py); here are
the rules of the usual decoders alone, so that nothing is refused that would start.
"""

from __future__ import annotations

from outrider.checkpoints.sizes import CheckpointSizes
from outrider.config import TargetConfig
from outrider.errors import ConfigError

# Models whose plan divides attention by heads.
_BY_HEADS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "glm4_moe",
)  # fmt: skip
_COUNTS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key-value heads"}
_INDIVISIBLE = ("bitsandbytes", "torchao")


def check_division(target: TargetConfig, sizes: CheckpointSizes) -> None:
    """Raise ConfigError for a checkpoint that --tp-size does not divide."""
    ranks, config = target.tp_size, sizes.config
    if ranks == 1:
        return
    method = str((config.get("quantization_config") or {}).get("quant_method", ""))
    if method in _INDIVISIBLE:
        raise ConfigError(f"weights quantized by {method} cannot be divided among ranks; leave out --tp-size")
    if config.get("model_type") not in _BY_HEADS:
        return
    for name, words in _COUNTS.items():
        count = int(config.get(name) or 0)
        if count % ranks:
            raise ConfigError(
                f"--tp-size {ranks} does not divide the model's {count} {words}; choose a divisor of {count}"
            )
