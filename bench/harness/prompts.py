"""Prompts of a benchmark: read from files in the formats of Spec-Bench, MT-bench and ShareGPT, or synthetic."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BUNDLED_PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"

# With a leading space, each word is one token in almost every vocabulary: n words are about n tokens.
_COMMON_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into them
can only other time new some could these two may first then do any like my now over such our man me even most made after
also did many must before back see through way where get much go well your know should down work year because come
people just say each those take day good how long little use world own still here between life being under never same
another while last might us great old off come since against right state three take house again small part high
""".split()  # noqa: SIM905 - a list of them would be a page long

_CHARS_PER_TOKEN = 4  # estimates the length of reference answers, for which a file gives no token count


class Prompt(NamedTuple):
    """The user's turns of a conversation. lengths: tokens of each turn's reference answer; empty if unknown."""

    category: str
    turns: tuple[str, ...]
    lengths: tuple[int, ...] = ()


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file, in order.

    The file has JSON lines or one JSON list. A row has an optional "category" and one of:
    - "turns": a list of texts (Spec-Bench, MT-bench)
    - "prompt": one text
    - "conversations": ShareGPT's turns, with "from" and "value" or "role" and "content". Each human turn that is
      followed by an answer becomes a turn; the answer's length is estimated at 4 characters per token. Rows without
      such a turn are skipped.

    Raises ValueError with file and row for a row of any other form, and for invalid JSON.
    """
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        rows = list(enumerate(_parsed(text, str(file)), start=1))
    else:
        # splitlines() would also split at characters such as U+2028, which JSON texts may contain unescaped.
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        rows = [(number, _parsed(line, f"{file}, row {number}")) for number, line in lines]
    prompts = [_prompt_of(row, f"{file}, row {number}") for number, row in rows]
    return [prompt for prompt in prompts if prompt.turns]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None


def _prompt_of(row: Any, where: str) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no object")
    lengths: tuple[int, ...] = ()
    if "turns" in row:
        turns = row["turns"]
    elif "prompt" in row:
        turns = [row["prompt"]]
    elif "conversations" in row:
        answered = _answered_turns(row["conversations"], where)
        turns = [question for question, _ in answered]
        lengths = tuple(max(1, round(len(answer) / _CHARS_PER_TOKEN)) for _, answer in answered)
    else:
        raise ValueError(f'{where} has neither "turns" nor "prompt" nor "conversations"')
    if not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
        raise ValueError(f"{where} has turns that are not text, or no list of them")
    return Prompt(str(row.get("category", "all")), tuple(turns), lengths)


def _answered_turns(turns: Any, where: str) -> list[tuple[str, str]]:
    """Pairs of a human turn and the answer that follows it."""
    try:
        messages = [
            (turn.get("from") or turn["role"], turn["value"] if "value" in turn else turn["content"]) for turn in turns
        ]
    except (TypeError, LookupError, AttributeError):
        raise ValueError(f'{where} has turns without "from" and "value", or "role" and "content"') from None
    if not all(isinstance(text, str) for _, text in messages):
        raise ValueError(f"{where} has turns that are not text")
    pairs = itertools.pairwise((role in ("human", "user"), text) for role, text in messages)
    return [(question, answer) for (human, question), (again, answer) in pairs if human and not again]


def first_per_category(prompts: Iterable[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of each category, in file order; None returns all."""
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if limit is None or seen[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def sample(prompts: Sequence[Prompt], count: int | None, seed: int) -> list[Prompt]:
    """`count` prompts in a seeded random order that interleaves the categories; None returns all.

    Repeats the sequence from the start if there are fewer than `count`.
    """
    rng = random.Random(seed)
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    for group in by_category.values():
        rng.shuffle(group)
    mixed = [p for row in itertools.zip_longest(*by_category.values()) for p in row if p is not None]
    return mixed if count is None else list(itertools.islice(itertools.cycle(mixed), count if mixed else 0))


def equal_parts(prompts: Sequence[Prompt], count: int) -> list[list[Prompt]]:
    """The prompts in `count` parts of equal size; the remainder is dropped."""
    size = len(prompts) // count
    return [list(prompts[i * size : (i + 1) * size]) for i in range(count)]


def synthetic(count: int, input_len: int, output_len: int, spread: float, seed: int) -> list[Prompt]:
    """Prompts of about `input_len` random common words, with answers of about `output_len` tokens.

    spread: lengths are uniform in [1 - spread, 1 + spread] times the given ones. A word is about one token; results
    contain the server's own token counts.
    """
    rng = random.Random(f"synthetic {seed}")

    def around(length: int) -> int:
        return max(1, rng.randint(round(length * (1 - spread)), round(length * (1 + spread))))

    return [
        Prompt("synthetic", (" ".join(rng.choices(_COMMON_WORDS, k=around(input_len))),), (around(output_len),))
        for _ in range(count)
    ]


def token_prompts(folder: Path, context: int, count: int) -> list[list[int]]:
    """`count` different prompts of `context` tokens, made of the bundled prompts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [prompt.turns[0] for prompt in read_prompts(BUNDLED_PROMPTS)]
    found = []
    for i in range(count):
        tokens: list[int] = []
        at = i
        while len(tokens) < context:
            tokens += tokenizer.encode(f"Question {at}. {texts[at % len(texts)]}\n", add_special_tokens=False).ids
            at += 1
        found.append(tokens[:context])
    return found
