"""The target's tokenizer, rebuilt from the files that the target serves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from gateway.text.detokenizer import Detokenizer
from gateway.text.template import ChatTemplate
from outrider.errors import ConfigError, InvalidRequest


class ModelTokenizer:
    """Text to tokens and back, and the chat template."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """files: content by name; tokenizer.json is needed. Raises ConfigError."""
        if "tokenizer.json" not in files:
            raise ConfigError("the target's checkpoint has no tokenizer.json; save its tokenizer in that format")
        self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = json.loads(files.get("tokenizer_config.json", b"{}"))
        special = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := _content(settings.get(name))) is not None
        }
        self.template = ChatTemplate(_template_source(files, settings), special)

    def encode(self, text: str) -> list[int]:
        """Tokens of a raw prompt, with the special tokens that the tokenizer puts around texts."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation. Raises InvalidRequest."""
        text = self.template.render(messages, **options)
        tokens = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if not tokens:
            raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
        return tokens

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer."""
        return Detokenizer(self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _content(token: Any) -> str | None:
    """A special token stands as text or as an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _template_source(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source
