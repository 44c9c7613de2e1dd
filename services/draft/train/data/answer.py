"""An answer while a target writes it: its tokens and hidden states so far."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class RequestedAnswer:
    """prompt: tokens of the prompt. done: set once all states that the answer needs have arrived."""

    tokens: list[int]
    prompt: int
    rows: list[NDArray[np.uint8]] = field(default_factory=list)
    row_count: int = 0
    ended: bool = False  # the end-of-sequence token was sampled
    due: int | None = None  # states that the answer needs; None until its length is known
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def add(self, tokens: Iterable[int], eos: Container[int]) -> None:
        """Append tokens, up to the one that ends the answer."""
        for token in tokens:
            self.tokens.append(token)
            if token in eos:
                self.ended, self.due = True, len(self.tokens) - 1
                return

    def resolve(self) -> None:
        """Complete the answer with the rows that have arrived."""
        if not self.done.done():
            self.done.set_result(None)
