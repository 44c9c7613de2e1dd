"""Guesses and their verification, round after round, without coming back to the engine in between.

Between two rounds nothing is to be known but which guesses were right, so a compiled program goes on by itself
(kernels/cpu/csrc/rounds.cpp) as long as tokens gather anyway. What came of each round is told afterwards.

    of a head      it guesses, the model verifies
    of a copy      narrow weights draft a chain, the model verifies it
    of both        the head guesses, the copy verifies, until there is a chain; the model verifies that
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class FusedLoop:
    """For a session that is alone.

    seconds:     after which no round begins
    room:        tokens that may be committed
    chain:       tokens after which the copy drafts no more; 0 where there is none
    longest:     tokens that it may have drafted then
    known:       rows that the head has written
    depth:       guesses of a round, at most; 0 where no head guesses
    others:      the first guesses, beside which a second one may be verified
    second_odds: as of Burst.odds, for second guesses
    """

    seconds: float
    room: int
    chain: int = 0
    longest: int = 0
    known: int = 0
    depth: int = 0
    others: int = 0
    second_odds: array[float] | None = None


class LoopRound(NamedTuple):
    """What came of one.

    written:             rows of committed tokens that the head computed first
    guesses, chain:      that it drafted, and that were verified, one behind the other
    others:              beside which of them a second one was
    right, accepted:     guesses of the chain that were committed; nodes that were, second ones included
    committed:           tokens
    guessing, verifying: seconds
    odds:                what the head said of each guess of the chain, and of its second
    known:               rows of committed tokens that the head has written
    within:              rounds of the copy that made the chain
    """

    written: int
    guesses: int
    chain: int
    others: Sequence[int]
    right: int
    accepted: int
    committed: int
    guessing: float
    verifying: float
    odds: Sequence[tuple[float, float]]
    known: int
    within: Sequence[LoopRound] = ()

    @property
    def nodes(self) -> int:
        """Guesses that were verified."""
        return self.chain + len(self.others)
