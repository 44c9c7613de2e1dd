"""Bytes of single tokens, for log-probabilities, which are reported token by token."""

from __future__ import annotations

from tokenizers import Tokenizer

from gateway.text.detokenizer import byte_alphabet

_SPACE = "\u2581"  # the space in SentencePiece tokens


class Pieces(dict[int, bytes]):
    """Bytes of each token, computed on first use; a special token is its name, an unknown one is empty."""

    def __init__(self, tokenizer: Tokenizer, decoder_type: str | None) -> None:
        """decoder_type: as named in tokenizer.json."""
        super().__init__()
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._byte_of = byte_alphabet() if decoder_type == "ByteLevel" else None

    def __missing__(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            value = b""
        elif token in self._added:
            value = text.encode()
        elif self._byte_of is not None:
            byte_of = self._byte_of
            known = all(character in byte_of for character in text)
            value = bytes(byte_of[character] for character in text) if known else text.encode()
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            value = bytes([int(text[3:5], 16)])
        else:
            value = text.replace(_SPACE, " ").encode()
        self[token] = value
        return value

    def text(self, token: int) -> str:
        """The token as text; a part of a character as "bytes:" and its bytes, as in OpenAI's API."""
        piece = self[token]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
