"""The target's checkpoint, as far as feature-based drafters need it: its embedding, its head and a few facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.config_json import load_config, values_of
from outrider.errors import ConfigError
from services.draft.model.layers.config import eos_of
from services.draft.model.params import Params
from services.draft.model.weights.tensors import Tensors

# Model types whose norms multiply by 1 + weight.
_CENTERED = (
    "gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma", "qwen3_next", "qwen3_5",
    "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "step3p5",
)  # fmt: skip
_EMBED, _HEAD, _NORM = "embed_tokens.weight", "lm_head.weight", "model.norm.weight"


PutAnywhere = Callable[[NDArray[Any]], jax.Array | NDArray[Any]]
"""Puts arrays onto the device, or keeps them in NumPy."""


@dataclass(frozen=True)
class TargetCheckpoint:
    """The target's checkpoint. vocab_size: rows of its embedding. replaced: tensors that are others by now, by name."""

    folder: Path
    hidden_size: int
    vocab_size: int
    layers: int
    eos_token_ids: tuple[int, ...]
    replaced: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def embedding_and_head(self, put: PutAnywhere, *, embedding: bool = True, head: bool = True) -> Params:
        """`embed` and `head` as Params have them; only `head` if they are tied. Raises ConfigError."""
        with Tensors(self.folder, replaced=self.replaced) as tensors:
            embed, own_head = self._names(tensors)
            if own_head is None and head:
                return {"head": put(self._read(tensors, embed).T)}
            params: Params = {"embed": put(self._read(tensors, embed))} if embedding else {}
            if own_head is not None and head:
                params["head"] = put(self._read(tensors, own_head).T)
        return params

    def _names(self, tensors: Tensors) -> tuple[str, str | None]:
        """Names of the embedding, and of the head unless they are tied. Raises ConfigError."""
        embed = _find(tensors, _EMBED)
        if embed is None:
            raise ConfigError(f"{self.folder} has no embedding that a drafter could share; expected {_EMBED}")
        return embed, _find(tensors, _HEAD)

    def shared(self, *, embedding: bool = True, head: bool = True) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that `embedding_and_head` reads, by name. Raises ConfigError."""
        with Tensors(self.folder) as tensors:
            embed, own_head = self._names(tensors)
        wanted = {embed: embedding or (head and own_head is None)} | ({} if own_head is None else {own_head: head})
        return {name: (self.vocab_size, self.hidden_size) for name, there in wanted.items() if there}

    def _read(self, tensors: Tensors, name: str) -> NDArray[Any]:
        return tensors.read(name, (self.vocab_size, self.hidden_size))


def _find(tensors: Tensors, ending: str) -> str | None:
    """The model's own tensor with that name; MTP layers may have copies."""
    names = [name for name in tensors.names if f".{name}".endswith(f".{ending}") and not _in_a_layer(name)]
    return min(names, key=len, default=None)


def _in_a_layer(name: str) -> bool:
    return any(part.isdigit() or part == "mtp" for part in name.split("."))


def read_target(folder: Path) -> TargetCheckpoint:
    """The facts of a target's checkpoint. Raises ConfigError."""
    raw = load_config(folder)
    raw = raw.get("text_config") or raw
    with values_of(folder / "config.json"):
        return TargetCheckpoint(folder, raw["hidden_size"], raw["vocab_size"], raw["num_hidden_layers"], eos_of(raw))


def read_norm(target: TargetCheckpoint) -> NDArray[Any]:
    """The weight of the target's final norm, offset included, [H] float32. Raises ConfigError."""
    raw = load_config(target.folder)
    offset = float((raw.get("text_config") or raw).get("model_type") in _CENTERED)
    with Tensors(target.folder) as tensors:
        name = _find(tensors, _NORM)
        if name is None:
            raise ConfigError(f"{target.folder} has no final norm; expected {_NORM}")
        return tensors.read(name, (target.hidden_size,)).astype(np.float32) + np.float32(offset)


def target_logits(target: TargetCheckpoint) -> tuple[float, float | None]:
    """Factor and softcap of a target's logits; softcap is None without one."""
    raw = load_config(target.folder)
    raw = raw.get("text_config") or raw
    with values_of(target.folder / "config.json"):
        # Granite divides; Cohere and Falcon-H1 multiply.
        factor = float(raw.get("logit_scale") or raw.get("lm_head_multiplier") or 1.0) / float(
            raw.get("logits_scaling") or 1.0
        )
        # Gemma 2's model classes use 30 where its config.json has no value.
        softcap = raw.get("final_logit_softcapping", 30.0 if raw.get("model_type") == "gemma2" else None)
        return factor, None if softcap is None else float(softcap)


def check_fit(folder: Path, target: TargetCheckpoint, *, vocab_size: int, hidden_size: int) -> None:
    """Raise ConfigError unless a draft's sizes are the target's."""
    wrong = [
        f"{name} {own}, not {theirs}"
        for name, own, theirs in (
            ("vocab_size", vocab_size, target.vocab_size),
            ("hidden_size", hidden_size, target.hidden_size),
        )
        if own != theirs
    ]
    if wrong:
        raise ConfigError(
            f"{folder} was made for another target than {target.folder}: it has {' and '.join(wrong)}. "
            "Name the checkpoint that it belongs to with --model-path"
        )
