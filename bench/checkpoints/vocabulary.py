"""A vocabulary of any size for random checkpoints: the default model's tokenizer, with further merges of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter, TokenType

from outrider.checkpoints.conversion import default_gguf

_IDS = ("bos", "eos", "unknown", "padding")
_BYTES_LIKE_SPACE = "Ġ"  # begins a token of a word


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level tokenizer, as GGUF files have it. ids: of special tokens, by name; pre: how texts are split."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    ids: dict[str, int]
    pre: str
    chat_template: str

    def write(self, writer: GGUFWriter) -> None:
        """Add the fields to a file."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        for name, token in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        writer.add_chat_template(self.chat_template)


def vocabulary(size: int, seed: int = 0) -> Vocabulary:
    """The default model's vocabulary with `size` tokens. Further ones are merges of two of its tokens.

    All of them are ordinary tokens with a text of their own, so that every token of an answer can be seen.
    """
    reader = GGUFReader(default_gguf())

    def field(name: str) -> Any:
        found = reader.get_field(f"tokenizer.{name}")
        return None if found is None else found.contents()

    tokens, merges = list(field("ggml.tokens")), list(field("ggml.merges"))
    types = [int(kind) for kind in field("ggml.token_type")]
    if size < len(tokens):
        raise ValueError(f"a vocabulary has at least the default model's {len(tokens)} tokens, not {size}")
    ordinary = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL]
    inner = [token for token in ordinary if _BYTES_LIKE_SPACE not in token]
    rng, known = np.random.default_rng(seed), set(tokens)
    while len(tokens) < size:
        left, right = ordinary[rng.integers(len(ordinary))], inner[rng.integers(len(inner))]
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    types += [int(TokenType.NORMAL)] * (size - len(types))
    ids = {name: int(token) for name in _IDS if (token := field(f"ggml.{name}_token_id")) is not None}
    return Vocabulary(tokens, types, merges, ids, field("ggml.pre"), field("chat_template"))
