"""Two checkpoints of one model, and the texts of each."""

import pytest

from tests.support.target.controlled import requests
from tests.support.target.driving import engine_of, load_model, run
from tests.support.tiny import write_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Two checkpoints of one architecture."""
    base = tmp_path_factory.mktemp("weights")
    return [write_model(base / str(seed), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="session")
def texts(folders):
    """What freshly started targets say, by checkpoint and temperature."""
    return {
        (i, t): run(engine_of(load_model(folder)), requests(t)).new
        for i, folder in enumerate(folders)
        for t in (0.0, 1.0)
    }
