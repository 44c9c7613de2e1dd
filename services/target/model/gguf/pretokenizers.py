"""Pre-tokenizers, which split texts before bytes are merged to tokens, for GGUF files with others than GPT-2's.

A file has only the pre-tokenizer's name (`tokenizer.ggml.pre`). For an unknown name `transformers` uses GPT-2's, which
gives some texts other tokens than in training, such as "\\n\\n1." for SmolLM2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gguf import GGUFReader
from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence

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
    return Sequence([_split(step) if isinstance(step, str) else step for step in steps])


def _split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


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
                        _split("[0-9][0-9][0-9]")]),
}  # fmt: skip

# Those that `transformers` knows by itself: Llama 3's and Qwen 2's, and others.
_LIKE_OTHERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx",
                     "jina-v5-nano", "smaug-bpe"), _words(r"\p{N}{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _words(r"\p{N}")),
}  # fmt: skip
_ELSEWHERE = {"tekken", "qwen35", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"}


def apply(reader: GGUFReader, tokenizer: Any) -> str | None:
    """Set the pre-tokenizer that a file names. Returns a warning for the user if the name is unknown, else None.

    tokenizer: as `transformers` made it from the file
    """
    backend, name = tokenizer.backend_tokenizer, field(reader, "tokenizer.ggml.pre")
    if field(reader, "tokenizer.ggml.model") != "gpt2" or not isinstance(backend.pre_tokenizer, ByteLevel):
        return None  # of another kind, or known to `transformers`
    if name in _SPLITS:
        backend.pre_tokenizer = _SPLITS[name]
    return _warning(name)


class Split(NamedTuple):
    """How texts are split. warning: for the user, if the file leaves it open"""

    steps: PreTokenizer
    warning: str | None


def of_name(name: str | None) -> Split | None:
    """The pre-tokenizer of a byte-level vocabulary, by its name; None for one that only `transformers` has."""
    if name in _ELSEWHERE:
        return None
    steps = _LIKE_OTHERS.get(name or "") or _SPLITS.get(name or "") or ByteLevel(add_prefix_space=False)
    return Split(steps, None if name in _LIKE_OTHERS else _warning(name))


def _warning(name: str | None) -> str | None:
    if name in _SPLITS or name in _LIKE_GPT_2:
        return None
    how = "does not say how texts are split" if name is None else f'has texts split as "{name}", which is not known'
    return (
        f"it {how}; they are split as GPT-2's are, and some may become other tokens than the model has learnt: "
        "take the checkpoint as safetensors instead"
    )
