"""What is asked in a benchmark: prompts from files in the usual forms, or made of random words."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Each is one token of almost every vocabulary when a space stands before it, so n words are about n tokens.
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into them
can only other time new some could these two may first then do any like my now over such our man me even most made after
also did many must before back see through way where get much go well your know should down work year because come
people just say each those take day good how long little use world own still here between life being under never same
another while last might us great old off come since against right state three take house again small part high
""".split()  # noqa: SIM905 - a list of them would be a page long

_CHARACTERS = 4  # of a token of an answer whose tokens nobody has counted


class Prompt(NamedTuple):
    """What a user says, turn by turn. lengths: of the answers, in tokens, turn by turn; empty if the data has none."""

    category: str
    turns: tuple[str, ...]
    lengths: tuple[int, ...] = ()


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file, in its order.

    Either JSON lines or one JSON list. A row has "turns" (Spec-Bench, MT-bench), "prompt", or "conversations"
    (ShareGPT, whose turns have "from" and "value", or "role" and "content": the human's are taken, with the lengths of
    the answers to them, of which four characters are taken for a token; rows in which no human is answered are left
    out), and perhaps a "category".
    Raises ValueError that names file and row, for rows of another form and for what is no JSON.
    """
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        rows = list(enumerate(_parsed(text, str(file)), start=1))
    else:
        # What else ends lines, such as U+2028, may stand in a text, where JSON escapes this alone.
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
        answered = _answered(row["conversations"], where)
        turns = [question for question, _ in answered]
        lengths = tuple(max(1, round(len(answer) / _CHARACTERS)) for _, answer in answered)
    else:
        raise ValueError(f'{where} has neither "turns" nor "prompt" nor "conversations"')
    if not (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
        raise ValueError(f"{where} has turns that are not text, or no list of them")
    return Prompt(str(row.get("category", "all")), tuple(turns), lengths)


def _answered(turns: Any, where: str) -> list[tuple[str, str]]:
    """What humans say in a conversation, where they are answered, and the answers."""
    try:
        said = [
            (turn.get("from") or turn["role"], turn["value"] if "value" in turn else turn["content"]) for turn in turns
        ]
    except (TypeError, LookupError, AttributeError):
        raise ValueError(f'{where} has turns without "from" and "value", or "role" and "content"') from None
    if not all(isinstance(text, str) for _, text in said):
        raise ValueError(f"{where} has turns that are not text")
    pairs = itertools.pairwise((speaker in ("human", "user"), text) for speaker, text in said)
    return [(question, answer) for (human, question), (again, answer) in pairs if human and not again]


def first_of_each(prompts: Iterable[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of every category, in their order; all of them for None."""
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if limit is None or seen[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def sample(prompts: Sequence[Prompt], count: int | None, seed: int) -> list[Prompt]:
    """`count` prompts in an order that the seed decides, the categories taking turns; all of them for None.

    If there are fewer, the same ones come again, in the same order.
    """
    rng = random.Random(seed)
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    for group in by_category.values():
        rng.shuffle(group)
    mixed = [p for row in itertools.zip_longest(*by_category.values()) for p in row if p is not None]
    return mixed if count is None else list(itertools.islice(itertools.cycle(mixed), count if mixed else 0))


def rounds_of(prompts: Sequence[Prompt], count: int) -> list[list[Prompt]]:
    """The prompts in `count` parts of equal size; those that are left over are not asked."""
    size = len(prompts) // count
    return [list(prompts[i * size : (i + 1) * size]) for i in range(count)]


def synthetic(count: int, input_len: int, output_len: int, spread: float, seed: int) -> list[Prompt]:
    """Prompts of random common words, about `input_len` of them, for answers of about `output_len` tokens.

    spread: lengths are uniform in [1 - spread, 1 + spread] times those asked for. A word is about a token; what the
    server counted is in the results.
    """
    rng = random.Random(f"synthetic {seed}")

    def around(length: int) -> int:
        return max(1, rng.randint(round(length * (1 - spread)), round(length * (1 + spread))))

    return [
        Prompt("synthetic", (" ".join(rng.choices(_WORDS, k=around(input_len))),), (around(output_len),))
        for _ in range(count)
    ]
