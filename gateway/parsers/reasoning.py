"""Reasoning before an answer, between `<think>` and `</think>`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from gateway.text.stop import overlap

BEGIN, END = "<think>", "</think>"
_BEGIN, _END = BEGIN.encode(), END.encode()


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

    def finish(self, *, cut: bool = False) -> tuple[str, str]:
        """The reasoning and the content held back, at the end of the text.

        cut: the text did not end by itself. What can still become the end marker is then no reasoning.
        """
        rest = self._take(len(self._held))
        return ("" if cut else rest, "") if self._inside else ("", rest)

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
    """Counts the tokens of reasoning with its markers, each of which may be one token or several."""

    def __init__(self, pieces: Mapping[int, bytes], *, inside: bool) -> None:
        """pieces: bytes of each token. inside: the prompt ends with the begin marker."""
        self.count = 0
        self._pieces = pieces
        self._decided = inside
        self._ended = False
        self._before = b""  # the last bytes so far, with which a marker may begin

    def add(self, tokens: Sequence[int]) -> None:
        """Count the next tokens of the answer."""
        if self._ended or not tokens:
            return
        pieces = [self._pieces[token] for token in tokens]
        text = self._before + b"".join(pieces)
        if not self._decided:
            begun = text.lstrip()
            self._decided = len(begun) >= len(_BEGIN) or not _BEGIN.startswith(begun)
            if self._decided and not begun.startswith(_BEGIN):
                self.count, self._ended = 0, True
                return
        end = text.find(_END) + len(_END)
        if end >= len(_END):
            ends = itertools.accumulate(map(len, pieces), initial=len(self._before))
            self.count += sum(start < end for start in list(ends)[:-1])
            self._ended = True
        else:
            self.count += len(tokens)
            self._before = text[1 - len(_END) :] if self._decided else text
