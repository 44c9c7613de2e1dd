"""The special tokens of a tokenizer by the names that templates know them by, such as bos_token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN = ("extra_special_tokens", "model_specific_special_tokens")  # names that one model alone has


def special_tokens(settings: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, str]:
    """What `transformers` finds in tokenizer_config.json and, where that does not list added tokens, beside it.

    beside: special_tokens_map.json, in which older checkpoints have them; empty if there is none
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
    """A special token stands as text or as an object with its content."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None
