"""Accept lengths of recorded answers, along which verification steps walk from one root to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_DRAWS = 1000  # of the bootstrap


def walked(accepted: NDArray[np.int64]) -> tuple[int, int]:
    """Tokens and verification steps of an answer whose roots accept these draft tokens."""
    place, steps = 0, 0
    while place < len(accepted):
        place, steps = place + int(accepted[place]) + 1, steps + 1
    return place, steps


@dataclass
class Walks:
    """Tokens and verification steps by answer, with the answers' categories."""

    counts: list[tuple[int, int]] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)

    def add(self, category: str, accepted: NDArray[np.int64]) -> None:
        """An answer. accepted: draft tokens at every root."""
        if len(accepted):
            self.counts.append(walked(accepted))
            self.categories.append(category)

    def length(self, category: str | None = None) -> float:
        """Accept length of a category, or of all."""
        chosen = [c for c, own in zip(self.counts, self.categories, strict=True) if category in (None, own)]
        return sum(tokens for tokens, _ in chosen) / max(sum(steps for _, steps in chosen), 1)

    def interval(self) -> float:
        """Half the width of the 95 % interval of all answers' accept length, by bootstrap over answers."""
        counts = np.array(self.counts)
        draws = np.random.default_rng(0).integers(len(counts), size=(_DRAWS, len(counts)))
        tokens, steps = counts[draws].sum(axis=1).T
        low, high = np.quantile(tokens / steps, (0.025, 0.975))
        return float(high - low) / 2
