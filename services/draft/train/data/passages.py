"""User turns that quote earlier answers of the target, with tasks such as summaries or questions about them.

An opening is a whole turn if it has

    {passages}   excerpts of earlier answers, together as long as documents that users paste
    {sentence}   one sentence of an excerpt
    {question}   a question that a user asked, to which {passages} hold the answer among other text

A small model continues such a turn poorly by itself, and its answers about long texts would be missing from the data.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cached_property

from outrider.text.tokenizer import Tokenizer
from services.draft.learning.records.store import Store

_MARKS = re.compile(r"\{(passages|sentence|question)\}")
_SENTENCES = re.compile(r"[^.!?\n]*[.!?\n]+\s*")  # whole ones
_SENTINEL = "\u2042\u2042\u2042"  # a text that no template has
_MIN_CHARACTERS, _MAX_CHARACTERS = 600, 3200  # of all passages together
_MIN_PASSAGE = 160  # characters
_TRIES = 32
_MIN_ANSWERS = 16  # stored answers before any is quoted


def quotes(opening: str) -> bool:
    """True if an opening is a whole turn that quotes the target."""
    return bool(_MARKS.search(opening))


def whole_sentences(text: str) -> str:
    """A text without a last sentence that is cut off."""
    return "".join(_SENTENCES.findall(text))


def user_turn_frame(tokenizer: Tokenizer) -> tuple[str, str]:
    """The template's text before and behind the content of a first user turn."""
    before, _, behind = tokenizer.template.render([{"role": "user", "content": _SENTINEL}]).partition(_SENTINEL)
    return before, behind


class Passages:
    """Builds whole turns from the answers in a store; held-out conversations are not quoted."""

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        self._store, self._tokenizer = store, tokenizer

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """The template's frame; computed on demand, because models for plain texts need no template."""
        return user_turn_frame(self._tokenizer)

    def fill(self, opening: str, seed: int) -> str:
        """An opening with all marks filled in; empty while there are too few answers."""
        rng = random.Random(seed)
        if len(self._store) < _MIN_ANSWERS:
            return ""
        passages, questions = self._choose(rng, rng.randint(_MIN_CHARACTERS, _MAX_CHARACTERS))
        if not passages or (not questions and "{question}" in opening):
            return ""
        sentences = [s.strip() for s in _SENTENCES.findall(rng.choice(passages)) if s.strip()]
        values = {
            "passages": "\n".join(passages),
            "sentence": rng.choice(sentences) if sentences else passages[0],
            "question": rng.choice(questions) if questions else "",
        }
        return _MARKS.sub(lambda mark: values[mark[1]], opening)

    def _choose(self, rng: random.Random, size: int) -> tuple[list[str], list[str]]:
        """Passages of `size` characters together, and short questions that some of them answer."""
        passages: list[str] = []
        questions: list[str] = []
        left, coolest = size, self._store.entries["temperature"].min()  # text makes less sense at high temperature
        for _ in range(_TRIES):
            index = rng.randrange(len(self._store))
            entry = self._store.entries[index]
            if entry["held_out"] or entry["temperature"] > coolest:
                continue
            question, answer = self._dialogue(index)
            passage = whole_sentences(answer[:left]).strip()
            if len(passage) < _MIN_PASSAGE:
                continue
            passages.append(passage)
            left -= len(passage)
            if question and len(question) < _MIN_PASSAGE:
                questions.append(question)
            if left < _MIN_PASSAGE:
                break
        return passages, questions

    def _dialogue(self, index: int) -> tuple[str, str]:
        """The user turn of a record, empty unless it is the first turn, and the answer."""
        entry, tokens = self._store.entries[index], self._store.tokens(index)
        text = self._tokenizer.decode(tokens[: int(entry["prompt"])].tolist(), verbatim=True)
        before, behind = self._frame
        question = text.removeprefix(before).removesuffix(behind) if text.startswith(before) else ""
        alone = bool(before.strip()) and before.strip() not in question and behind.strip() not in question
        return question.strip() if alone else "", self._answer(tokens[int(entry["prompt"]) :].tolist())

    def _answer(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens).strip()
