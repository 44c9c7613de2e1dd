"""What readers of a model's text take out of it, piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.text.stop import overlap


class CallPart(NamedTuple):
    """A part of a call. call: its number. name: with its first part alone. arguments: JSON text that this part adds."""

    call: int
    name: str | None
    arguments: str


@dataclass
class Delta:
    """What a piece of text adds."""

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)


class CallReader(ABC):
    """Takes calls out of a growing text."""

    @abstractmethod
    def push(self, text: str) -> Delta:
        """What a piece of text adds; what could become a call is held back."""

    @abstractmethod
    def finish(self) -> Delta:
        """What was held back, at the end of the text."""


def cut_at(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """The text before the first marker, the marker, and what follows it.

    Without one: the text that can belong to none, None, and what may be the beginning of one.
    """
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    if found:
        place, marker = min(found)
        return text[:place], marker, text[place + len(marker) :]
    held = max(overlap(text, marker) for marker in markers)
    return text[: len(text) - held], None, text[len(text) - held :]
