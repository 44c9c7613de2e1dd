"""Pre-tokenizers, which split texts before bytes are merged to tokens, for GGUF files with others than GPT-2's.

A file has only the pre-tokenizer's name (`tokenizer.ggml.pre`). For an unknown name `transformers` uses GPT-2's, which
gives some texts other tokens than in training, such as "\\n\\n1." for SmolLM2.
"""

from __future__ import annotations

from typing import Any

from gguf import GGUFReader
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

from services.target.model.gguf.metadata import field

_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
_WORDS = ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's
# What the tokenizers of those models have in their published tokenizer.json.
_DIGITS = Sequence([Digits(individual_digits=True), _WORDS])
_LIKE_GPT_2 = {
    "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling", "gigachat", "roberta-bpe",
    "jina-v1-en", "jina-es", "jina-de",
}  # fmt: skip


def _words(numbers: str, after_marks: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*") -> PreTokenizer:
    """Words with what stands before them, numbers, marks with the ends of lines behind them, and space."""
    ways = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", numbers, after_marks, r"\s*[\r\n]+",
        r"\s+(?!\S)", r"\s+",
    )  # fmt: skip
    return _each("|".join(ways), _BYTES)


def _each(*steps: str | PreTokenizer) -> PreTokenizer:
    """One after the other; a pattern stands for what it matches, and what lies between."""
    return Sequence([Split(Regex(step), "isolated") if isinstance(step, str) else step for step in steps])


_SPLITS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("mellum", "mellum2"), _DIGITS),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _words(r"\p{N}")),
    **dict.fromkeys(("chatglm-bpe", "glm4"), _words(r"\p{N}{1,3}")),
    "seed-coder": _words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),
    "deepseek-coder": _each(
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", Digits(individual_digits=True), _BYTES
    ),
    "falcon": Sequence([Punctuation("contiguous"), _WORDS, Digits(individual_digits=False),
                        Split(Regex("[0-9][0-9][0-9]"), "isolated")]),
}  # fmt: skip


def apply(reader: GGUFReader, tokenizer: Any) -> str | None:
    """Set the pre-tokenizer that a file names. Returns a warning for the user if the name is unknown, else None.

    tokenizer: as `transformers` made it from the file
    """
    backend, name = tokenizer.backend_tokenizer, field(reader, "tokenizer.ggml.pre")
    if field(reader, "tokenizer.ggml.model") != "gpt2" or not isinstance(backend.pre_tokenizer, ByteLevel):
        return None  # of another kind, or known
    if name in _SPLITS:
        backend.pre_tokenizer = _SPLITS[name]
    elif name not in _LIKE_GPT_2:
        how = "does not say how texts are split" if name is None else f'has texts split as "{name}", which is not known'
        return (
            f"it {how}; they are split as GPT-2's are, and some may become other tokens than the model has learnt: "
            "take the checkpoint as safetensors instead"
        )
    return None
