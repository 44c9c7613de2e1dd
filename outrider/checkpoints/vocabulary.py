"""Comparison of two models' vocabularies: a draft model and its target must have the same token ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.checkpoints import checkpoint
from outrider.checkpoints.config_json import load_config
from outrider.errors import ConfigError

_REMEDY = "choose a draft of the target's family"


@dataclass(frozen=True)
class Vocabulary:
    """model: name of the model. size: in tokens, 0 if unknown. hash: of the tokenizer, empty without one."""

    model: str
    size: int
    hash: str


def of_checkpoint(folder: Path, model: str) -> Vocabulary:
    """The vocabulary of a model, from its files, before the model is loaded."""
    config = load_config(folder)
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 0
    return Vocabulary(model, size, checkpoint.vocab_hash(folder))


def check_same(draft: Vocabulary, target: Vocabulary) -> None:
    """Raise ConfigError, with the difference, unless both models have the same token ids."""
    differ = f"the vocabularies of the draft model {draft.model} and the target's {target.model} differ"
    if draft.hash and target.hash:
        if draft.hash != target.hash:
            raise ConfigError(f"{differ}: hash {draft.hash}, not {target.hash}; {_REMEDY}")
        return  # sizes may differ by padding: the target drops draft tokens that it has no id for
    if draft.size and target.size and draft.size != target.size:
        raise ConfigError(f"{differ}: {draft.size} tokens, not {target.size}; {_REMEDY}")
