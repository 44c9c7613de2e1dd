"""How often guesses of a probability were right: what a draft says of itself, put right by what became of it."""

from __future__ import annotations

from array import array

_BINS = 16
_PRIOR = 4.0  # guesses that count as tried in a bin before the first
_MOST = 400.0  # of a bin; beyond, what was long ago counts less


class CalibrationBins:
    """Chances by what a draft said, for greedy sessions and for sampled ones.

    table: [2, 16] float32 ("f"), those of greedy sessions first, by sixteenths of the probability; kernels read it
    """

    def __init__(self) -> None:
        middles = [(i + 0.5) / _BINS for i in range(_BINS)]
        self.table = array("f", middles * 2)
        self._right = [_PRIOR * middle for middle in middles] * 2
        self._tried = [_PRIOR] * (2 * _BINS)

    def chance(self, odds: float, *, greedy: bool) -> float:
        """That a guess is right of which a draft says that it is this probable."""
        return self.table[_place(odds, greedy)]

    def observe(self, odds: float, *, right: bool, greedy: bool) -> None:
        """A guess was right or wrong."""
        place = _place(odds, greedy)
        if self._tried[place] >= _MOST:
            self._right[place] /= 2.0
            self._tried[place] /= 2.0
        self._right[place] += right
        self._tried[place] += 1.0
        self.table[place] = self._right[place] / self._tried[place]


def _place(odds: float, greedy: bool) -> int:
    return min(int(odds * _BINS), _BINS - 1) + (0 if greedy else _BINS)
