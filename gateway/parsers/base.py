"""The interface of parsers of tool calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.text.stop import overlap


class CallPart(NamedTuple):
    """A part of a call. call: its index. name: in its first part only. arguments: JSON text that this part adds."""

    call: int
    name: str | None
    arguments: str


@dataclass
class Delta:
    """The content and calls that a piece of text adds."""

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)


class CallParser(ABC):
    """Parses the tool calls of a growing text."""

    @abstractmethod
    def push(self, text: str) -> Delta:
        """The content and calls that a piece of text adds; a possible beginning of a call is held back."""

    @abstractmethod
    def finish(self) -> Delta:
        """The content held back, at the end of the text."""


def cut_at(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """The text before the first marker, the marker, and the text behind it.

    Without a marker: the text that cannot belong to one, None, and the possible beginning of one.
    """
    found = [(index, marker) for marker in markers if (index := text.find(marker)) >= 0]
    if found:
        index, marker = min(found)
        return text[:index], marker, text[index + len(marker) :]
    held = max(overlap(text, marker) for marker in markers)
    return text[: len(text) - held], None, text[len(text) - held :]
