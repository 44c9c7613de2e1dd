"""How sharp a head's logits should be once it has learnt.

Cross entropy makes a head's distribution the mean of all those of the target that its states cannot tell apart, and a
mean is flatter than each of them. Candidates are ranked by log-probability and the target's noise together, and nodes
by products of probabilities: both get more of the target's tokens right when the mean is made sharper again. How much
is tried on held-out answers; it becomes part of the published matrix and costs nothing.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from services.draft.learning.store import Record
from services.draft.train.evaluate import TREE, Score, replay

log = logging.getLogger(__name__)

_FACTORS = (1.0, 1.1, 1.2, 1.35)

# Writes a draft whose logits are larger by a factor into a folder.
Publish = Callable[[float, Path], None]


def best_factor(
    algorithm: str, publish: Publish, target: Path, records: Sequence[Record], device: str = "auto"
) -> tuple[float, list[float]]:
    """Of some factors the one with the longest accept length over all temperatures, and what each is to the first.

    device: as of `replay`
    """
    scores: list[Mapping[float, Score]] = []
    for factor in _FACTORS:
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            publish(factor, Path(folder))
            scores.append(replay(algorithm, Path(folder), target, records, TREE, device))
    gains = [_gain(score, scores[0]) for score in scores]
    best = max(range(len(gains)), key=gains.__getitem__)
    log.info("logits times %g: accept length of trees %+.1f %%", _FACTORS[best], 100 * (gains[best] - 1))
    return _FACTORS[best], [round(gain, 4) for gain in gains]


def _gain(score: Mapping[float, Score], first: Mapping[float, Score]) -> float:
    """Mean ratio of accept lengths over temperatures. They are below 1 only where all answers are of one token."""
    return sum(score[t].accept_length / max(first[t].accept_length, 1.0) for t in first) / len(first)
