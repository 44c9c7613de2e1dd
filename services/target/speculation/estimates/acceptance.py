"""How often draft tokens are accepted: decayed counts by bins, each of which starts at a prior."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

PRIOR_WEIGHT = 3.0  # draft tokens that a prior counts for
DECAY = 0.97  # of a bin's evidence, per chain: the last 33 count most, because texts change


class AcceptanceEstimate:
    """Acceptance rates of n bins.

    table: [n] float32 ("f"), the rates; compiled kernels read it in place
    """

    def __init__(self, priors: Sequence[float], decay: float) -> None:
        """priors: [n], the rates before any evidence. decay: of a bin's evidence, with each observation in it."""
        self._priors, self._decay = priors, decay
        self._tried = [0.0] * len(priors)
        self._accepted = [0.0] * len(priors)
        self.table = array("f", priors)

    @property
    def tried(self) -> float:
        """Draft tokens of all bins that count as evidence."""
        return sum(self._tried)

    def rate(self, place: int = 0) -> float:
        """Accepted over tried draft tokens of a bin."""
        return (self._accepted[place] + PRIOR_WEIGHT * self._priors[place]) / (self._tried[place] + PRIOR_WEIGHT)

    def observe(self, tried: float, accepted: float, place: int = 0, decay: float | None = None) -> None:
        """Add an observation. tried, accepted: draft tokens, or sums of their expected numbers. decay: instead of the
        usual one."""
        kept = self._decay if decay is None else decay
        self._tried[place] = self._tried[place] * kept + tried
        self._accepted[place] = self._accepted[place] * kept + accepted
        self.table[place] = self.rate(place)

    def fade(self, factor: float) -> None:
        """Scale the evidence of all bins by a factor, so that a source that is not used drifts back to its priors."""
        for place in range(len(self.table)):
            self._tried[place] *= factor
            self._accepted[place] *= factor
            self.table[place] = self.rate(place)
