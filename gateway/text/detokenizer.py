"""Incremental detokenization: tokens in, text out, never half a character.

The concatenated pieces equal the text of all tokens decoded at once; for a continued text, what they add to the text
before. Special tokens are omitted unless requested.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_REPLACEMENT = "\ufffd"  # what an incomplete character decodes to
# Tokens for which a text ending in U+FFFD is held back; a character has at most 4 bytes, at worst a token each.
_MAX_HELD = 4
# Tokens of a continued text that are decoded again: decoders treat the first token differently, and some are omitted.
_CONTEXT = 8


class Detokenizer(ABC):
    """Text of one growing token sequence."""

    @abstractmethod
    def add(self, tokens: Sequence[int]) -> str:
        """The text that tokens add; an incomplete character is held back."""

    @abstractmethod
    def finish(self) -> str:
        """The text held back; an incomplete character becomes replacement characters."""


def factory(
    tokenizer: Tokenizer, decoder_type: str | None, *, verbatim: bool = False
) -> Callable[[Sequence[int]], Detokenizer]:
    """A function that makes a detokenizer, given the tokens of the text that it continues; none for a new text.

    decoder_type: as named in tokenizer.json. verbatim: with special tokens
    """
    omitted = set() if verbatim else _special_ids(tokenizer)
    if decoder_type == "ByteLevel":
        table = _TokenBytes(tokenizer, omitted)
        return lambda _: ByteLevelDetokenizer(table)
    kinds = _TokenKinds(tokenizer, omitted)
    return lambda before: WindowDetokenizer(tokenizer, kinds, before)


class ByteLevelDetokenizer(Detokenizer):
    """For tokens that stand for bytes: looks the bytes up and decodes them as UTF-8."""

    def __init__(self, table: _TokenBytes) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[int]) -> str:
        """As in Detokenizer."""
        return self._utf8.decode(b"".join([self._table[token] for token in tokens]))

    def finish(self) -> str:
        """As in Detokenizer."""
        return self._utf8.decode(b"", True)


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token, computed on first use; omitted and unknown tokens have none."""

    def __init__(self, tokenizer: Tokenizer, omitted: set[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = omitted
        self._byte_of = byte_alphabet()

    def __missing__(self, token: int) -> bytes:
        text = None if token in self._special else self._tokenizer.id_to_token(token)
        if text is None:
            value = b""
        elif all(character in self._byte_of for character in text):
            value = bytes(self._byte_of[character] for character in text)
        else:
            value = text.encode()  # an added token that was never split into bytes
        self[token] = value
        return value


def byte_alphabet() -> dict[str, int]:
    """Byte of each character of byte-level tokens: printable bytes are themselves, others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert table.keys() == set(ByteLevel.alphabet())
    return table


class _Kind(Enum):
    OMITTED = 0  # special or unknown
    TEXT = 1
    BYTE = 2  # one byte of a character that has no token of its own, such as <0xE4>


class _TokenKinds(dict[int, _Kind]):
    """Kind of each token, computed on first use."""

    def __init__(self, tokenizer: Tokenizer, omitted: set[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = omitted

    def __missing__(self, token: int) -> _Kind:
        text = None if token in self._special else self._tokenizer.id_to_token(token)
        if text is None:
            kind = _Kind.OMITTED
        else:
            kind = _Kind.BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else _Kind.TEXT
        self[token] = kind
        return kind


class WindowDetokenizer(Detokenizer):
    """For all other tokenizers: decodes a window of the latest tokens again.

    The window begins one piece before the last complete one, because decoders treat the first token differently. A run
    of byte tokens is held back to its end, because only then its characters are known.
    """

    def __init__(self, tokenizer: Tokenizer, kinds: _TokenKinds, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._kinds = kinds
        self._window = [token for token in before[-_CONTEXT:] if kinds[token] is not _Kind.OMITTED]
        while self._window and kinds[self._window[-1]] is _Kind.BYTE:  # may begin an incomplete character
            self._window.pop()
        self._complete = len(self._window)  # tokens of the window whose text was returned
        self._returned = self._decode() if self._window else ""  # their text

    def add(self, tokens: Sequence[int]) -> str:
        """As in Detokenizer."""
        self._window += [token for token in tokens if self._kinds[token] is not _Kind.OMITTED]
        waiting = len(self._window) - self._complete
        if not waiting or self._kinds[self._window[-1]] is _Kind.BYTE:
            return ""
        text = self._decode()
        if text.endswith(_REPLACEMENT) and waiting < _MAX_HELD:
            return ""
        piece = text[len(self._returned) :]
        self._window = self._window[self._complete :]
        self._complete = len(self._window)
        self._returned = self._decode()
        return piece

    def finish(self) -> str:
        """As in Detokenizer."""
        text = self._decode()
        piece, self._returned = text[len(self._returned) :], text
        self._complete = len(self._window)
        return piece

    def _decode(self) -> str:
        return str(
            self._tokenizer.decode(self._window, skip_special_tokens=False)
        )  # omitted tokens are not in the window


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
