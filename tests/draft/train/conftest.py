"""A target with a repeating text, and a head that predicts it perfectly."""

import numpy as np
import pytest

from tests.support.checkpoints.perfect import cycle_text, write_cyclic_target, write_perfect_eagle3
from tests.support.draft.training import states_of_cycle


@pytest.fixture(scope="module")
def perfect(tmp_path_factory):
    """A target, a head that predicts it perfectly, and an answer of it with states."""
    base = tmp_path_factory.mktemp("perfect")
    target = write_cyclic_target(base / "target")
    write_perfect_eagle3(base / "head", target)
    tokens = np.array([60, *cycle_text(60, 60)], np.uint32)
    return (
        target,
        base / "head",
        tokens,
        np.tile(states_of_cycle(target, tokens).view(np.uint16), (1, 4)).view(np.uint8),
    )
