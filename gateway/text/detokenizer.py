"""Incremental detokenizing: tokens in, text out, never half a character.

The pieces put together are what decoding all tokens at once gives: of a text that goes on, what they add to the tokens
before. Special tokens are left out unless asked for.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_REPLACEMENT = "\ufffd"  # what an incomplete character decodes to
# Tokens that a text ending in U+FFFD may wait; a character has at most 4 bytes, each of them a token at worst.
_PATIENCE = 4
# Tokens of a text before that are looked at: decoders treat the first one of all differently, and some may be left out.
_BEFORE = 8


class Detokenizer(ABC):
    """Text of one growing token sequence."""

    @abstractmethod
    def add(self, tokens: Sequence[int]) -> str:
        """The text that tokens add; what may be half a character waits."""

    @abstractmethod
    def finish(self) -> str:
        """What has waited: an incomplete character is given out as replacement characters."""


def factory(
    tokenizer: Tokenizer, decoder_type: str | None, *, verbatim: bool = False
) -> Callable[[Sequence[int]], Detokenizer]:
    """How to make a detokenizer of what follows some tokens; of none for a text of its own.

    decoder_type: as named in tokenizer.json. verbatim: with special tokens
    """
    left_out = set() if verbatim else _special_ids(tokenizer)
    if decoder_type == "ByteLevel":
        table = _Bytes(tokenizer, left_out)
        return lambda _: ByteLevelDetokenizer(table)
    kinds = _Kinds(tokenizer, left_out)
    return lambda before: WindowDetokenizer(tokenizer, kinds, before)


class ByteLevelDetokenizer(Detokenizer):
    """For tokens that stand for bytes: looks the bytes up and decodes them as UTF-8."""

    def __init__(self, table: _Bytes) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[int]) -> str:
        """As in Detokenizer."""
        return self._utf8.decode(b"".join([self._table[token] for token in tokens]))

    def finish(self) -> str:
        """As in Detokenizer."""
        return self._utf8.decode(b"", True)


class _Bytes(dict[int, bytes]):
    """Bytes of each token, filled as tokens are met; those left out and unknown ones have none."""

    def __init__(self, tokenizer: Tokenizer, left_out: set[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = left_out
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
    """Byte of each character that byte-level tokens are written in: printable ones are themselves, others follow."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert table.keys() == set(ByteLevel.alphabet())
    return table


class _Kind(Enum):
    LEFT_OUT = 0  # special or unknown
    TEXT = 1
    BYTE = 2  # one byte of a character that has no token of its own, such as <0xE4>


class _Kinds(dict[int, _Kind]):
    """Kind of each token, filled as tokens are met."""

    def __init__(self, tokenizer: Tokenizer, left_out: set[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = left_out

    def __missing__(self, token: int) -> _Kind:
        text = None if token in self._special else self._tokenizer.id_to_token(token)
        if text is None:
            kind = _Kind.LEFT_OUT
        else:
            kind = _Kind.BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else _Kind.TEXT
        self[token] = kind
        return kind


class WindowDetokenizer(Detokenizer):
    """For all other tokenizers: decodes a window of the latest tokens again.

    The window begins one piece before the last complete one, because decoders treat the first token differently. A run
    of byte tokens waits for its end: only then is it known which of its bytes are characters.
    """

    def __init__(self, tokenizer: Tokenizer, kinds: _Kinds, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._kinds = kinds
        self._window = [token for token in before[-_BEFORE:] if kinds[token] is not _Kind.LEFT_OUT]
        while self._window and kinds[self._window[-1]] is _Kind.BYTE:  # it may be the beginning of a character
            self._window.pop()
        self._complete = len(self._window)  # tokens of the window whose text was given out
        self._given = self._decode() if self._window else ""  # the text of those

    def add(self, tokens: Sequence[int]) -> str:
        """As in Detokenizer."""
        self._window += [token for token in tokens if self._kinds[token] is not _Kind.LEFT_OUT]
        waiting = len(self._window) - self._complete
        if not waiting or self._kinds[self._window[-1]] is _Kind.BYTE:
            return ""
        text = self._decode()
        if text.endswith(_REPLACEMENT) and waiting < _PATIENCE:
            return ""
        piece = text[len(self._given) :]
        self._window = self._window[self._complete :]
        self._complete = len(self._window)
        self._given = self._decode()
        return piece

    def finish(self) -> str:
        """As in Detokenizer."""
        text = self._decode()
        piece, self._given = text[len(self._given) :], text
        self._complete = len(self._window)
        return piece

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._window, skip_special_tokens=False))  # they are not in the window


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
