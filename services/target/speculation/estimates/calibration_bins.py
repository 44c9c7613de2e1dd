"""Calibration of a head's probabilities: acceptance rates by probability, greedy and sampled sessions apart."""

from __future__ import annotations

from array import array

from services.target.speculation.estimates.acceptance import AcceptanceEstimate

BINS = 16  # as in the compiled kernels (csrc/programs/program.h)
_DECAY = 1.0 - 1.0 / 400.0  # of a bin: the last 400 draft tokens count most


class CalibrationBins:
    """Acceptance rates by probability.

    table: [2, 16] float32 ("f"), greedy sessions first, by sixteenths of the probability; compiled kernels read it
    """

    def __init__(self) -> None:
        middles = [(i + 0.5) / BINS for i in range(BINS)]
        self._estimate = AcceptanceEstimate(middles * 2, _DECAY)

    @property
    def table(self) -> array[float]:
        """See the class."""
        return self._estimate.table

    @property
    def tried(self) -> float:
        """As of AcceptanceEstimate."""
        return self._estimate.tried

    def rate(self, probability: float, *, greedy: bool) -> float:
        """Acceptance rate of draft tokens that the head gives this probability."""
        return self.table[_bin(probability, greedy)]

    def observe(self, probability: float, *, accepted: bool, greedy: bool) -> None:
        """A draft token was accepted or rejected."""
        self._estimate.observe(1.0, float(accepted), _bin(probability, greedy))


def _bin(probability: float, greedy: bool) -> int:
    return min(int(probability * BINS), BINS - 1) + (0 if greedy else BINS)
