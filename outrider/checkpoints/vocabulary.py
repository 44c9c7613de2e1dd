"""Whether token ids mean the same to two models, as a draft's and its target's must."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError

_REMEDY = "choose a draft of the target's family"


@dataclass(frozen=True)
class Vocabulary:
    """model: what it is called. size: tokens, 0 if nobody knows. hash: of the tokenizer, empty if there is none."""

    model: str
    size: int
    hash: str


def of_checkpoint(folder: Path, model: str) -> Vocabulary:
    """What a model's files say of it, before anything is loaded."""
    config = checkpoint.load_json(folder / "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 0
    return Vocabulary(model, size, checkpoint.vocab_hash(folder))


def check_same(draft: Vocabulary, target: Vocabulary) -> None:
    """Raise ConfigError, naming the fact that differs, unless token ids mean the same to both models."""
    differ = f"the vocabularies of the draft model {draft.model} and the target's {target.model} differ"
    if draft.hash and target.hash:
        if draft.hash != target.hash:
            raise ConfigError(f"{differ}: hash {draft.hash}, not {target.hash}; {_REMEDY}")
        return  # equal tokenizers may be padded to different sizes: the target drops hints that it has no token for
    if draft.size and target.size and draft.size != target.size:
        raise ConfigError(f"{differ}: {draft.size} tokens, not {target.size}; {_REMEDY}")
