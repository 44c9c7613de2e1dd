"""A draft model and the same model as a slower target, for tests of whole systems."""

import pytest

from tests.support.tiny import write_model, write_slower_twin, write_tokenizer


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("draft"), seed=3))


@pytest.fixture(scope="session")
def folder(tmp_path_factory, draft_folder):
    """The target's model: as the draft model, but slow enough for proposals to arrive in time."""
    return write_tokenizer(write_slower_twin(tmp_path_factory.mktemp("target"), draft_folder, 64000))
