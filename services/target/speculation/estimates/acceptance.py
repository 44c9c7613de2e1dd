"""How often draft tokens are accepted: decayed counts by bins, each of which starts at a prior."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class AcceptanceEstimate:
    """Acceptance rates of n bins.

    table: [n] float32 ("f"), the rates; compiled kernels read it in place
    """

    def __init__(self, priors: Sequence[float], weight: float, decay: float) -> None:
        """priors: [n], the rates before any evidence; weight: draft tokens that each prior counts for.

        decay: what remains of a bin's evidence with each observation in it
        """
        self._priors, self._weight, self._decay = priors, weight, decay
        self._tried = [0.0] * len(priors)
        self._accepted = [0.0] * len(priors)
        self.table = array("f", priors)

    def rate(self, place: int = 0) -> float:
        """Accepted over tried draft tokens of a bin."""
        return (self._accepted[place] + self._weight * self._priors[place]) / (self._tried[place] + self._weight)

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
