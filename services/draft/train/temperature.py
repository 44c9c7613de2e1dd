"""The scale of a trained draft's logits.

Cross entropy makes the draft's distribution the mean of all target distributions that its states cannot distinguish,
and a mean is flatter than each of them. Candidates are ranked by log-probability plus the target's noise, and nodes by
products of probabilities; both match the target more often when the mean is sharpened. The factor is chosen on held-out
answers and multiplied into the published matrix, so it costs nothing at run time.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outrider.config import Algorithm
from outrider.speculation.shape import TreeShape
from services.draft.learning.records.store import Record
from services.draft.train.evaluate import TREE, Score, replay

log = logging.getLogger(__name__)

_FACTORS = (1.0, 1.1, 1.2, 1.35)

# Writes a draft whose logits are multiplied by a factor into a folder.
Publish = Callable[[float, Path], None]


def best_factor(
    algorithm: Algorithm,
    publish: Publish,
    target: Path,
    records: Sequence[Record],
    shape: TreeShape = TREE,
    device: str = "auto",
) -> tuple[float, list[float]]:
    """The factor with the longest accept length over all temperatures, and the gain of each over the first.

    shape, device: as of `replay`
    """
    scores: list[Mapping[float, Score]] = []
    for factor in _FACTORS:
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            publish(factor, Path(folder))
            scores.append(replay(algorithm, Path(folder), target, records, shape, device))
    gains = [_gain(score, scores[0]) for score in scores]
    best = max(range(len(gains)), key=gains.__getitem__)
    log.info("logits times %g: accept length of trees %+.1f %%", _FACTORS[best], 100 * (gains[best] - 1))
    return _FACTORS[best], [round(gain, 4) for gain in gains]


def _gain(score: Mapping[float, Score], first: Mapping[float, Score]) -> float:
    """Mean ratio of accept lengths over temperatures. They are below 1 only if all answers have a single token."""
    return sum(score[t].accept_length / max(first[t].accept_length, 1.0) for t in first) / len(first)
