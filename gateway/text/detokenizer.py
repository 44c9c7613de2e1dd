"""Incremental detokenizing: tokens in, text out, never half a character.

The pieces put together are what decoding all tokens at once gives. Only a window of the latest tokens is decoded again;
it begins where the text was complete, one piece back, because some decoders treat the first token differently.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"  # what an incomplete character decodes to


class Detokenizer:
    """Text of one growing token sequence."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._complete = 0  # tokens of the window after which the text was complete last
        self._emitted = 0  # characters of the window's text that were given out

    def add(self, tokens: Sequence[int]) -> str:
        """The text that tokens add; what may be half a character waits."""
        self._window += tokens
        text = self._decode(self._window)
        stable = text.rstrip(_REPLACEMENT)
        piece = stable[self._emitted :]
        self._emitted = max(self._emitted, len(stable))
        if len(stable) == len(text):
            self._window = self._window[self._complete :]
            self._complete = len(self._window)
            self._emitted = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """What has waited: an incomplete character is given out as replacement characters."""
        piece = self._decode(self._window)[self._emitted :]
        self._emitted += len(piece)
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=self._skip))
