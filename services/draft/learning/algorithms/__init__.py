"""Training algorithms by their names on the command line. A new one subclasses base.Algorithm and is entered here."""

from collections.abc import Callable

from services.draft.formats.target import TargetCheckpoint
from services.draft.learning.algorithms.base import Algorithm, DraftShape
from services.draft.learning.algorithms.dflash import Dflash
from services.draft.learning.algorithms.eagle import Eagle
from services.draft.learning.algorithms.eagle3 import Eagle3
from services.draft.learning.algorithms.mtp import Mtp
from services.draft.learning.algorithms.standalone import Standalone

__all__ = ["Algorithm", "DraftShape", "algorithm_of"]

_ALGORITHMS: dict[str, Callable[[TargetCheckpoint, DraftShape], Algorithm]] = {
    "DFLASH": Dflash,
    "EAGLE": Eagle,
    "EAGLE3": Eagle3,
    "NEXTN": Mtp,
    "STANDALONE": Standalone,
}


def algorithm_of(name: str, target: TargetCheckpoint, shape: DraftShape) -> Algorithm:
    """The algorithm for a target. Raises ConfigError for a shape that does not fit."""
    return _ALGORITHMS[name](target, shape)
