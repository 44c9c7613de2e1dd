"""A model's tokenizer, from the files of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from outrider.errors import ConfigError, InvalidRequest
from outrider.text.special import special_tokens
from outrider.text.template import ChatTemplate

TEMPLATES = "additional_chat_templates/"
"""Folder of a checkpoint with further chat templates, one named file for each."""

LONG_TEXT = 4096  # characters or tokens above which encoding or decoding takes long


class Tokenizer:
    """Encodes and decodes text, and renders conversations."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """files: content by path in the checkpoint's folder, at least tokenizer.json. Raises ConfigError."""
        if "tokenizer.json" not in files:
            raise ConfigError("the target's checkpoint has no tokenizer.json; save its tokenizer in that format")
        self.content = load_settings(files, "tokenizer.json")
        settings = load_settings(files, "tokenizer_config.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"the target's tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = special_tokens(settings, load_settings(files, "special_tokens_map.json"))
        self._begin = self._tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
        self._add_begin: bool | None = settings.get("add_bos_token")
        self.settings = settings
        sources = _template_sources(files, settings)
        self.template = ChatTemplate(sources.get("default"), special, sources.get("tool_use"))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a raw prompt, with one begin token if the tokenizer adds one, never two.

        special: False adds no special tokens
        """
        if not special:
            return self.encode_rendered(text)
        tokens = self._ids(text, special=self._add_begin is None)
        if self._begin is None:
            return tokens
        if self._add_begin and tokens[:1] != [self._begin]:
            return [self._begin, *tokens]
        return tokens[1:] if tokens[:2] == [self._begin, self._begin] else tokens

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of text from a chat template, or of a part of it."""
        return self._ids(text, special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # The library releases Python's global lock for a batch, but not for a single text.
        if len(text) >= LONG_TEXT:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation. Raises InvalidRequest."""
        tokens = self.encode_rendered(self.template.render(messages, **options))
        if not tokens:
            raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
        return tokens

    def decode(self, tokens: Sequence[int], *, verbatim: bool = False) -> str:
        """The text of tokens. verbatim: include special tokens."""
        ids = list(tokens)
        if len(ids) >= LONG_TEXT:  # see _ids
            (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=not verbatim)
            return str(text)
        return str(self._tokenizer.decode(ids, skip_special_tokens=not verbatim))


def load_settings(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in a file; empty without the file. Raises ConfigError."""
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ConfigError(f"the target's {name} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"the target's {name} is no JSON object")
    return content


def _template_sources(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: "default" for all conversations, "tool_use" for those with tools."""
    paths = {"default": "chat_template.jinja"} | {
        path.removeprefix(TEMPLATES).removesuffix(".jinja"): path for path in files if path.startswith(TEMPLATES)
    }
    found = {name: files[path].decode() for name, path in paths.items() if path in files}
    if "default" in found:
        return found
    source = settings.get("chat_template")
    if source is None:  # multimodal models have it beside their processor
        source = load_settings(files, "chat_template.json").get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source} | found
    return found if source is None else {"default": source} | found
