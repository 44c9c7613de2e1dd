"""What a session's own text says may follow: what came after its last tokens when they stood there before.

Texts quote their prompts and go on as they did, summaries and code above all. To look back costs next to nothing, so
such chains pay even where every other draft is dearer than a plain step. Prompt lookup decoding (Saxena, 2023), with
the chance of a chain measured by how many of the last tokens are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST = 2  # tokens that must be the same
_MOST = 12  # more tell no more
_LOOKED_AT = 8  # of the places where the last tokens stood before, the latest ones
_KEPT = 0.99  # what remains of the evidence after a chain
_KEPT_LONGER = 0.98  # ... and with time
_PRIOR = 4.0  # tokens that the prior counts for
# Before the first: chances by how many tokens are the same, from LEAST on.
_CHANCES = np.linspace(0.5, 0.9, _MOST - LEAST + 1)


def find(tokens: NDArray[np.uint32], most: int) -> tuple[int, NDArray[np.uint32]]:
    """Where a text's last tokens stood before, the place at which most of them are the same; of equals, the latest.

    tokens: [length]. Returns how many are the same, 0 if less than LEAST, and up to `most` tokens that came after them.
    """
    length = len(tokens)
    nothing = 0, tokens[length:]
    if length <= LEAST or most < 1:
        return nothing
    behind = np.flatnonzero(tokens[LEAST - 1 : -1] == tokens[-1]) + LEAST  # places behind the same last token
    behind = behind[tokens[behind - LEAST] == tokens[-LEAST]][-_LOOKED_AT:]
    if not len(behind):
        return nothing
    same = [_same(tokens, int(place)) for place in behind]
    best = max(range(len(same)), key=lambda i: (same[i], i))
    place = int(behind[best])
    return same[best], tokens[place : place + most]


def _same(tokens: NDArray[np.uint32], place: int) -> int:
    """How many tokens before a place are the text's last ones."""
    count = min(place, _MOST)
    unlike = np.flatnonzero(tokens[place - count : place] != tokens[len(tokens) - count :])
    return count - 1 - int(unlike[-1]) if len(unlike) else count


class PromptLookup:
    """How often texts went on as they had before."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew with what texts taught."""
        self._right = np.zeros(len(_CHANCES))
        self._tried = np.zeros(len(_CHANCES))

    def fade(self) -> None:
        """Forget a little of everything: what did not pay is tried again one day."""
        self._right *= _KEPT_LONGER
        self._tried *= _KEPT_LONGER

    def chances(self) -> NDArray[np.float64]:
        """That a token is right if those before it are, by how many tokens are the same: LEAST, LEAST + 1, ..."""
        chances: NDArray[np.float64] = (self._right + _PRIOR * _CHANCES) / (self._tried + _PRIOR)
        return chances

    def chance(self, same: int) -> float:
        """That of one of them."""
        return float(self.chances()[same - LEAST])

    def observe(self, same: int, drafted: int, accepted: int, *, goes_on: bool) -> None:
        """Take in what became of a chain. goes_on: False if its session ended with it, right as it may have been."""
        at = same - LEAST
        self._right[at] = self._right[at] * _KEPT + accepted
        self._tried[at] = self._tried[at] * _KEPT + accepted + (goes_on and accepted < drafted)
