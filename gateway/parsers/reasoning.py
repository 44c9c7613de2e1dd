"""Reasoning before an answer, between `<think>` and `</think>`."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.stop import overlap

BEGIN, END = "<think>", "</think>"


class Reasoning:
    """Splits a growing text into reasoning and content. A text that does not begin with reasoning has none."""

    def __init__(self, *, inside: bool) -> None:
        """inside: the prompt ends with the begin marker."""
        self._inside = inside
        self._beginning = True  # only line ends came so far of the present part
        self._decided = inside
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that a piece of text adds."""
        self._held += text
        if not self._decided and not self._decide():
            return "", ""
        if not self._inside:
            return "", self._trimmed(self._take(len(self._held)))
        end = self._held.find(END)
        if end < 0:
            return self._trimmed(self._take(len(self._held) - overlap(self._held, END))), ""
        reasoning = self._trimmed(self._take(end))
        self._take(len(END))
        self._inside, self._beginning = False, True
        return reasoning, self._trimmed(self._take(len(self._held)))

    def finish(self) -> tuple[str, str]:
        """The reasoning and the content held back, at the end of the text."""
        rest = self._take(len(self._held))
        return (rest, "") if self._inside else ("", rest)

    def _decide(self) -> bool:
        """Decide whether the text begins with reasoning. False while it is too short."""
        text = self._held.lstrip()
        if len(text) < len(BEGIN) and BEGIN.startswith(text):
            return False
        self._decided = True
        self._inside = text.startswith(BEGIN)
        if self._inside:
            self._held = text[len(BEGIN) :]
        else:
            self._beginning = False
        return True

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _trimmed(self, text: str) -> str:
        """The text without line ends next to a marker."""
        if self._beginning:
            text = text.lstrip("\n")
            self._beginning = not text
        return text


class ReasoningTokenCounter:
    """Counts the tokens of reasoning with its end marker; counts none if the markers are not single tokens."""

    def __init__(self, begin: int | None, end: int | None, *, inside: bool) -> None:
        """begin, end: token ids of the markers."""
        self.count = 0
        self._begin, self._end = begin, end
        self._inside = inside and end is not None
        self._first = True

    def add(self, tokens: Sequence[int]) -> None:
        """Count the next tokens of the answer."""
        if tokens and self._first:
            self._inside |= self._end is not None and tokens[0] == self._begin
            self._first = False
        if self._inside:
            self._inside = self._end not in tokens
            self.count += len(tokens) if self._inside else list(tokens).index(self._end or 0) + 1
