"""A tiny model."""

import pytest

from tests.support.target.driving import load_model
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)
