"""Tasks about passages: a user's turn that quotes what the target wrote before, to be summarized, say, or asked about.

An opening is a whole turn if it has

    {passages}   texts out of earlier answers, together as long as documents that people paste
    {sentence}   a sentence of one
    {question}   what a user asked, and {passages} answer among other things

A small model continues such a turn poorly by itself; and what it then says of long texts, it is never seen to say.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cached_property

from outrider.text.tokenizer import Tokenizer
from services.draft.learning.store import Store

_MARKS = re.compile(r"\{(passages|sentence|question)\}")
_SENTENCES = re.compile(r"[^.!?\n]*[.!?\n]+\s*")  # whole ones
_SENTINEL = "\u2042\u2042\u2042"  # a text that no template has
_LEAST, _MOST = 600, 3200  # characters of all passages together
_SHORTEST = 160  # characters of one
_TRIES = 32
_FEW = 16  # answers; before there are so many, nobody is asked about them


def quotes(opening: str) -> bool:
    """Whether an opening is a whole turn that quotes the target."""
    return bool(_MARKS.search(opening))


def whole_sentences(text: str) -> str:
    """A text without a last sentence that was cut off."""
    return "".join(_SENTENCES.findall(text))


def user_turn_frame(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the template puts before and behind the first words of a user."""
    before, _, behind = tokenizer.template.render([{"role": "user", "content": _SENTINEL}]).partition(_SENTINEL)
    return before, behind


class Passages:
    """Writes whole turns out of a store's answers; those of held-out conversations are not quoted."""

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        self._store, self._tokenizer = store, tokenizer

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """Of the template, which a model need not have that is asked for nothing but texts."""
        return user_turn_frame(self._tokenizer)

    def fill(self, opening: str, seed: int) -> str:
        """An opening with everything filled in; nothing as long as too little was written."""
        dice = random.Random(seed)
        if len(self._store) < _FEW:
            return ""
        passages, questions = self._choose(dice, dice.randint(_LEAST, _MOST))
        if not passages or (not questions and "{question}" in opening):
            return ""
        sentences = [s.strip() for s in _SENTENCES.findall(dice.choice(passages)) if s.strip()]
        values = {
            "passages": "\n".join(passages),
            "sentence": dice.choice(sentences) if sentences else passages[0],
            "question": dice.choice(questions) if questions else "",
        }
        return _MARKS.sub(lambda mark: values[mark[1]], opening)

    def _choose(self, dice: random.Random, size: int) -> tuple[list[str], list[str]]:
        """Passages of so many characters together, and short questions that some of them answered."""
        passages: list[str] = []
        questions: list[str] = []
        left, calmest = size, self._store.entries["temperature"].min()  # the hotter, the less sense
        for _ in range(_TRIES):
            index = dice.randrange(len(self._store))
            entry = self._store.entries[index]
            if entry["held_out"] or entry["temperature"] > calmest:
                continue
            question, answer = self._said(index)
            passage = whole_sentences(answer[:left]).strip()
            if len(passage) < _SHORTEST:
                continue
            passages.append(passage)
            left -= len(passage)
            if question and len(question) < _SHORTEST:
                questions.append(question)
            if left < _SHORTEST:
                break
        return passages, questions

    def _said(self, index: int) -> tuple[str, str]:
        """A record's last turn of the user, empty if it was not the first one, and the answer."""
        entry, tokens = self._store.entries[index], self._store.tokens(index)
        text = self._tokenizer.decode(tokens[: int(entry["prompt"])].tolist(), verbatim=True)
        before, behind = self._frame
        question = text.removeprefix(before).removesuffix(behind) if text.startswith(before) else ""
        alone = bool(before.strip()) and before.strip() not in question and behind.strip() not in question
        return question.strip() if alone else "", self._answer(tokens[int(entry["prompt"]) :].tolist())

    def _answer(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens).strip()
