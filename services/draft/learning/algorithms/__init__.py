"""Algorithms whose drafts can be trained, by their names on the command line."""

from services.draft.formats.target import Target
from services.draft.learning.algorithms.base import Algorithm, Shape
from services.draft.learning.algorithms.eagle import Eagle
from services.draft.learning.algorithms.eagle3 import Eagle3
from services.draft.learning.algorithms.mtp import Mtp
from services.draft.learning.algorithms.standalone import Standalone

_ALGORITHMS = {"EAGLE": Eagle, "EAGLE3": Eagle3, "NEXTN": Mtp, "STANDALONE": Standalone}


def algorithm_of(name: str, target: Target, shape: Shape) -> Algorithm:
    """The algorithm for a target. Raises ConfigError for a shape that does not fit."""
    return _ALGORITHMS[name](target, shape)
