"""What fed heads share with their target: its embedding and its head, read from the target's checkpoint alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.checkpoint import load_json
from outrider.errors import ConfigError
from services.draft.model.layers.config import eos_of
from services.draft.model.layers.heads import Params
from services.draft.model.weights.arrays import Put
from services.draft.model.weights.tensors import Tensors

# Families whose norms multiply by 1 + weight.
_CENTERED = (
    "gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma", "qwen3_next", "qwen3_5",
    "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
)  # fmt: skip
_EMBED, _HEAD, _NORM = "embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Target:
    """The target's checkpoint. vocab_size counts rows of its embedding."""

    folder: Path
    hidden_size: int
    vocab_size: int
    layers: int
    eos_token_ids: tuple[int, ...]

    def embedding_and_head(self, put: Put, *, embedding: bool = True, head: bool = True) -> Params:
        """`embed` and `head` as Params have them; the head alone where it is both. Raises ConfigError."""
        with Tensors(self.folder) as tensors:
            own_head = _find(tensors, _HEAD)
            embed = _find(tensors, _EMBED)
            if embed is None:
                raise ConfigError(f"{self.folder} has no embedding that a drafter could share; expected {_EMBED}")
            if own_head is None and head:
                return {"head": put(self._read(tensors, embed).T)}
            params: Params = {"embed": put(self._read(tensors, embed))} if embedding else {}
            if own_head is not None and head:
                params["head"] = put(self._read(tensors, own_head).T)
        return params

    def _read(self, tensors: Tensors, name: str) -> NDArray[object]:
        return tensors.read(name, (self.vocab_size, self.hidden_size))


def _find(tensors: Tensors, ending: str) -> str | None:
    """The model's own tensor of that kind; layers that predict further tokens may have copies."""
    names = [name for name in tensors.names if f".{name}".endswith(f".{ending}") and not _in_a_layer(name)]
    return min(names, key=len, default=None)


def _in_a_layer(name: str) -> bool:
    return any(part.isdigit() or part == "mtp" for part in name.split("."))


def read_target(folder: Path) -> Target:
    """The facts of a target's checkpoint. Raises ConfigError."""
    raw = load_json(folder / "config.json")
    raw = raw.get("text_config") or raw
    try:
        return Target(folder, raw["hidden_size"], raw["vocab_size"], raw["num_hidden_layers"], eos_of(raw))
    except KeyError as error:
        raise ConfigError(
            f"{folder / 'config.json'} lacks {error}, which a drafter needs to know of its target"
        ) from None


def read_norm(target: Target) -> NDArray[Any]:
    """What the target's final norm multiplies by, [H] float32. Raises ConfigError."""
    raw = load_json(target.folder / "config.json")
    offset = float((raw.get("text_config") or raw).get("model_type") in _CENTERED)
    with Tensors(target.folder) as tensors:
        name = _find(tensors, _NORM)
        if name is None:
            raise ConfigError(f"{target.folder} has no final norm; expected {_NORM}")
        return tensors.read(name, (target.hidden_size,)).astype(np.float32) + np.float32(offset)


def target_logits(target: Target) -> tuple[float, float | None]:
    """What a target's logits are beside products of its states: their factor, and their softcap if there is one."""
    raw = load_json(target.folder / "config.json")
    raw = raw.get("text_config") or raw
    # Granite divides; Cohere and Falcon-H1 multiply.
    factor = float(raw.get("logit_scale") or raw.get("lm_head_multiplier") or 1.0) / float(
        raw.get("logits_scaling") or 1.0
    )
    # Where Gemma 2's config.json leaves it out, its classes mean 30.
    return factor, raw.get("final_logit_softcapping", 30.0 if raw.get("model_type") == "gemma2" else None)


def check_fit(folder: Path, target: Target, *, vocab_size: int, hidden_size: int) -> None:
    """Raise ConfigError unless a head's numbers are the target's."""
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
