"""The target's tokenizer, rebuilt from the files that the target serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from gateway.text import detokenizer
from gateway.text.detokenizer import Detokenizer
from gateway.text.pieces import Pieces
from outrider.text.tokenizer import Tokenizer


class ModelTokenizer(Tokenizer):
    """Text to tokens and back, as a whole and piece by piece, and the chat template."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """files: as of Tokenizer. Raises ConfigError."""
        super().__init__(files)
        decoder = _decoder_type(self.content.get("decoder"))
        self._new_detokenizer = detokenizer.factory(self._tokenizer, decoder)
        self._new_verbatim = detokenizer.factory(self._tokenizer, decoder, verbatim=True)
        self.pieces = Pieces(self._tokenizer, decoder)

    @cached_property
    def special(self) -> frozenset[str]:
        """Names of the special tokens."""
        return frozenset(
            added.content for added in self._tokenizer.get_added_tokens_decoder().values() if added.special
        )

    def id_of(self, token: str) -> int | None:
        """Id of a token by its name; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def detokenizer(self, before: Sequence[int] = (), *, verbatim: bool = False) -> Detokenizer:
        """A new detokenizer. before: tokens of the text that it continues. verbatim: special tokens become names."""
        return (self._new_verbatim if verbatim else self._new_detokenizer)(before)


def _decoder_type(decoder: Any) -> str | None:
    """Type of a decoder in tokenizer.json; a sequence of one decoder has its type."""
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence" and len(decoder.get("decoders", ())) == 1:
        decoder = decoder["decoders"][0]
    return decoder.get("type") if isinstance(decoder, dict) else None
