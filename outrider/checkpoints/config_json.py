"""config.json of a checkpoint, with the values on which sizes depend checked once, for all who read it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.checkpoints.checkpoint import load_json
from outrider.errors import ConfigError

# Counts, and the most that is believed: a draft's readers make objects for each layer.
_COUNTS = dict.fromkeys(
    ("vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size", "head_dim",
     "moe_intermediate_size", "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "n_head",
     "n_embd", "n_positions", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
     "sliding_window", "n_routed_experts", "num_experts", "num_experts_per_tok"), 1 << 31,
) | dict.fromkeys(("num_hidden_layers", "n_layer", "num_nextn_predict_layers"), 10_000)  # fmt: skip
_PARTS = ("text_config", "eagle_config", "dflash_config", "transformer_layer_config", "quantization_config",
          "rope_scaling", "rope_parameters")  # fmt: skip


def load_config(folder: Path) -> dict[str, Any]:
    """The configuration of a checkpoint, without sizes that are null, as many files write what they leave out.

    Raises ConfigError for a missing file, and for sizes that no model has.
    """
    file = folder / "config.json"
    content = load_json(file)
    _check(file, content)
    return content


def _check(file: Path, content: dict[str, Any]) -> None:
    for key, most in _COUNTS.items():
        value = content.get(key)
        if value is None:
            content.pop(key, None)
        elif not (type(value) is int and 0 <= value <= most):
            raise ConfigError(f"{file}: {key} is {value!r:.100}; it must be a whole number from 0 to {most}")
    for key in _PARTS:
        part = content.get(key)
        if part is not None and not isinstance(part, dict):
            raise ConfigError(f"{file}: {key} is {part!r:.100}; it must be an object")
        if isinstance(part, dict):
            _check(file, part)


@contextlib.contextmanager
def values_of(file: Path) -> Iterator[None]:
    """Turn errors about values that a JSON file lacks, or that no model can have, into ConfigError."""
    try:
        yield
    except KeyError as error:
        raise ConfigError(f"{file} lacks {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise ConfigError(f"{file} has a value that cannot be used: {error}; download it again") from error
