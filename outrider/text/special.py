"""Special tokens of a tokenizer, by the names that chat templates use, such as bos_token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN = ("extra_special_tokens", "model_specific_special_tokens")  # names of a single model


def special_tokens(settings: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that `transformers` finds: in tokenizer_config.json and, if that lists no added tokens, beside
    it.

    beside: special_tokens_map.json of older checkpoints; empty without one
    """
    found: dict[str, Any] = {}
    for source in (settings,) if "added_tokens_decoder" in settings else (settings, beside):
        for name in _OWN:
            own = source.get(name)
            found |= own if isinstance(own, Mapping) else {}
        found |= {name: source[name] for name in NAMES if name in source}
    contents = {name: _content(token) for name, token in found.items()}
    return {name: content for name, content in contents.items() if content is not None}


def _content(token: Any) -> str | None:
    """The text of a special token, which is a string or an object with its content."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None
