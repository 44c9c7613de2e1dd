"""Where tokens begin in the text of an answer, in characters.

A token begins behind the text of those before it. Tokens that share a character begin with it, and a token without
text, such as a special token that is omitted, begins where the next one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import ModelTokenizer


class TextOffsets:
    """Offsets of the tokens of one answer that continues a prompt, one after another; with an echo, of the prompt's."""

    def __init__(
        self, tokenizer: ModelTokenizer, prompt: Sequence[int], echo: str | None = None, *, verbatim: bool = False
    ) -> None:
        """echo: text of the prompt, if the answer begins with it. verbatim: the answer's text has special tokens."""
        self._tokenizer, self._prompt, self._verbatim = tokenizer, prompt, verbatim
        self._position = 0
        self._echo = echo or ""
        self._echoed = 0 if echo is None else len(prompt)  # tokens of the prompt still to come
        self._detokenizer = tokenizer.detokenizer() if self._echoed else self._of_answer()

    def _of_answer(self) -> Detokenizer:
        return self._tokenizer.detokenizer(self._prompt, verbatim=self._verbatim)

    def next(self, token: int) -> int:
        """The offset of the next token."""
        offset = self._position
        length = len(self._detokenizer.add((token,)))
        if not self._echoed:
            self._position += length
            return offset
        # A prompt names the special tokens that its text was given with, and not those that the tokenizer added.
        name = self._tokenizer.pieces.text(token)
        if name in self._tokenizer.special and self._echo.startswith(name, self._position):
            length = len(name)
        self._position = min(self._position + length, len(self._echo))
        self._echoed -= 1
        if not self._echoed:
            self._position, self._detokenizer = len(self._echo), self._of_answer()
        return offset
