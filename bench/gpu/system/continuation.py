"""The text of the random target (checkpoints.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Continuation:
    """Each token is followed by the next id, and the last one by the first. The ids are first .. first + size - 1."""

    first: int
    size: int

    def after(self, token: int, count: int = 1) -> int:
        """The token `count` places after a token of the text."""
        return self.first + (token - self.first + count) % self.size
