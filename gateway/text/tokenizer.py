"""The target's tokenizer, rebuilt from the files that the target serves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from gateway.text import detokenizer
from gateway.text.detokenizer import Detokenizer
from gateway.text.pieces import Pieces
from gateway.text.template import ChatTemplate
from outrider.errors import ConfigError, InvalidRequest


class ModelTokenizer:
    """Text to tokens and back, and the chat template."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """files: content by name; tokenizer.json is needed. Raises ConfigError."""
        if "tokenizer.json" not in files:
            raise ConfigError("the target's checkpoint has no tokenizer.json; save its tokenizer in that format")
        content = _json(files, "tokenizer.json")
        settings = _json(files, "tokenizer_config.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"the target's tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := _content(settings.get(name))) is not None
        }
        self._begin = self._tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
        self._add_begin: bool | None = settings.get("add_bos_token")
        self.template = ChatTemplate(_template_source(files, settings), special)
        decoder = _decoder_type(content.get("decoder"))
        self._new_detokenizer = detokenizer.factory(self._tokenizer, decoder)
        self.pieces = Pieces(self._tokenizer, decoder)

    def encode(self, text: str) -> list[int]:
        """Tokens of a raw prompt, with a begin token if the tokenizer puts one before texts, but never two."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=self._add_begin is None).ids
        if self._begin is None:
            return tokens
        if self._add_begin and tokens[:1] != [self._begin]:
            return [self._begin, *tokens]
        return tokens[1:] if tokens[:2] == [self._begin, self._begin] else tokens

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation. Raises InvalidRequest."""
        text = self.template.render(messages, **options)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not tokens:
            raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens)))

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer."""
        return self._new_detokenizer()


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ConfigError(f"the target's {name} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"the target's {name} is no JSON object")
    return content


def _content(token: Any) -> str | None:
    """A special token stands as text or as an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _decoder_type(decoder: Any) -> str | None:
    """Type of a decoder as tokenizer.json describes it; a sequence of one is that one."""
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence" and len(decoder.get("decoders", ())) == 1:
        decoder = decoder["decoders"][0]
    return decoder.get("type") if isinstance(decoder, dict) else None


def _template_source(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source
