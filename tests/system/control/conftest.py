"""Two checkpoints, systems that serve them, and the texts of each."""

import pytest

from tests.support.system.controlled import System
from tests.support.tiny import write_model, write_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one architecture."""
    base = tmp_path_factory.mktemp("weights")
    return [write_tokenizer(write_model(base / str(seed), seed=seed, num_hidden_layers=3)) for seed in (1, 2)]


@pytest.fixture
def system(folders, tmp_path):
    running = []

    def start(folder, **options):
        running.append(System(folder, tmp_path, **options))
        return running[-1]

    yield start
    for one in running:
        one.stop()


@pytest.fixture(scope="module")
def shared(folders, tmp_path_factory):
    """A system whose weights no test changes."""
    running = System(folders[0], tmp_path_factory.mktemp("shared"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def expected(folders, tmp_path_factory):
    """Texts of freshly started systems, by checkpoint."""
    texts = []
    for folder in folders:
        system = System(folder, tmp_path_factory.mktemp("fresh"))
        texts.append(system.texts(temperature=1, seed=3))
        system.stop()
    return texts
